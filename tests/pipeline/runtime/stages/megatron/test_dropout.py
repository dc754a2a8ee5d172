"""`SeededDropout`: masks follow the sample and the layer, and nothing else."""

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from tests import workers
from tests.pipeline.runtime.stages.megatron import megatron_cases as cases


@pytest.fixture(scope="module")
def results():
    return workers.run(1, f"{__name__}:single_worker_case", timeout=100)[0]


def single_worker_case() -> dict:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.pipeline.runtime.stages.megatron.data_and_dropout import SeededDropout

    case = cases.Case(dropout=0.1, layers=2)
    data = cases.microbatch_data(case, 0)
    with cases.parallel(case):
        model = cases.gpt_model(case)
        hooks = {rank: SeededDropout(cases.gpt_model(case), seed=1, tensor_rank=rank) for rank in (0, 1)}
        dropout = SeededDropout(model, seed=1)

        def output(sample: int, between: int = 0) -> torch.Tensor:
            torch.rand(between)
            with dropout.microbatch(sample):
                positions = torch.arange(cases.SEQUENCE).expand_as(data["tokens"])
                return model(data["tokens"], positions, cases.causal_mask()).detach()

        def draws(rank: int, layer: int) -> tuple[list[float], list[float]]:
            with hooks[rank].microbatch(5):
                hooks[rank]._seed_all("decoder", layer)
                outside = torch.rand(2).tolist()
                with get_cuda_rng_tracker().fork():
                    return outside, torch.rand(2).tolist()

        torch.manual_seed(11)
        expected = torch.rand(3)
        torch.manual_seed(11)
        first = output(4)
        after = torch.rand(3)
        result = {
            "generator_kept": torch.equal(expected, after),
            "repeatable": torch.equal(first, output(4, between=3)),
            "samples_differ": not torch.equal(first, output(6)),
            "draws": {(rank, layer): draws(rank, layer) for rank in (0, 1) for layer in (1, 2)},
            "inactive": SeededDropout(cases.gpt_model(cases.Case(layers=1)), seed=1).active,
        }
        model.head = torch.nn.Dropout(0.1)
        try:
            SeededDropout(model, seed=1)
            result["stray"] = "accepted"
        except ValueError as error:
            result["stray"] = str(error)
        return result


def test_masks_follow_the_sample_only(results):
    """The same sample has the same masks whatever was drawn before; another sample has others."""
    assert results["repeatable"] and results["samples_differ"]


def test_other_draws_go_on_undisturbed(results):
    """After a microbatch the generator is where it was before."""
    assert results["generator_kept"]


def test_tensor_ranks_share_what_is_not_forked(results):
    """Outside of the tracker's fork tensor ranks draw the same, inside each its own; layers differ everywhere."""
    draws = results["draws"]
    for layer in (1, 2):
        assert draws[0, layer][0] == draws[1, layer][0]
        assert draws[0, layer][1] != draws[1, layer][1]
    assert draws[0, 1][0] != draws[0, 2][0] and draws[0, 1][1] != draws[0, 2][1]


def test_a_model_without_dropout_has_no_hooks(results):
    """No dropout, no cost."""
    assert results["inactive"] is False


def test_a_dropout_that_no_hook_reaches_is_refused(results):
    """A dropout outside of layers and embedding would depend on the pipeline, so it is an error that names it."""
    assert "head" in results["stray"]
