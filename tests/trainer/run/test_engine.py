"""Runs with Transformer Engine's layers, those of tests/stand_ins, equal runs of one process with local ones."""

from unittest import mock

import pytest
import torch

from megatron.trainer.arguments import Platform
from megatron.trainer.start_up import initialize
from tests.pipeline.runtime.stages.megatron.megatron_model import NORMS_OF_ENGINE
from tests.trainer.run.run_case import joined_weights, table, train, train_case
from tests.trainer.run.test_virtual_stages import CLIPPED, DAMPED, EXACT, FULLY, P2, V2, single, values

ENGINE = "--transformer-impl transformer_engine --use-cpu-initialization --no-gradient-accumulation-fusion"


def as_on_a_gpu():
    """A context in which a run finds Transformer Engine."""
    platform = Platform(is_cuda=True, has_transformer_engine=True, has_apex=False)
    return mock.patch.object(initialize, "this_platform", lambda: platform)


def engine_case(**options) -> dict:
    """`train_case` as on a machine that has Transformer Engine."""
    with as_on_a_gpu():
        return train_case(**options)


def of_engine(num_ranks: int, flags: str, **options) -> list[dict]:
    """A run of Transformer Engine's layers; weights have the names of local ones."""
    function = f"{__name__}:engine_case"
    results = train(num_ranks, f"{flags} {ENGINE}", function=function, device="engine", **options)
    for result in results:
        for inside, alone in NORMS_OF_ENGINE.items():
            result["weights"] = {name.replace(inside, alone): each for name, each in result["weights"].items()}
    return results


RUNS = {
    "zb-h1": (EXACT, f"{P2} --pipeline-schedule zb-h1 --log-saved-activations"),
    "l2l": (EXACT, "--pipeline-model-parallel-size 1 --pipeline-schedule l2l"),
    "predicted weights": (EXACT, f"{P2} --pipeline-schedule 2bw --2bw-provisional stage"),
    "zbv, full recompute, clipped": (
        f"{CLIPPED} {DAMPED} {FULLY} --swiglu --normalization RMSNorm --position-embedding-type rope",
        f"{P2} --pipeline-schedule zbv {V2}",
    ),
    "flush, fused cross entropy": (
        f"{EXACT} {DAMPED}", f"{P2} --cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
    ),
}  # fmt: skip


@pytest.mark.sample(1)
@table("model, layout", RUNS, usual=2)
def test_training_equals_local_layers(model, layout):
    """Bit-equal, but where the loss is computed in another way, or tied gradients add up in another order. Predictions
    depend on the pipeline, so there the local layers have one, too.
    """
    predicts = "2bw" in layout
    number = 1 if "size 1" in layout else 2
    local = train(number, f"{model} {layout}") if predicts else None
    expected, weights = (values(local), joined_weights(local)) if predicts else single(model)
    results = of_engine(number, f"{model} {layout}")
    found, is_exact = joined_weights(results), EXACT in model and "te" not in layout.split()
    assert values(results)["lm_loss"] == pytest.approx(expected["lm_loss"], rel=0 if is_exact else 1e-6)
    assert values(results)["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-12 if is_exact else 2e-6)
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0 if is_exact else 1e-5, msg=name)


@pytest.mark.full
def test_a_checkpoint_of_local_layers_goes_on_with_those_of_the_engine(tmp_path):
    """And the other way: names in checkpoints are those of the whole model."""
    flags = f"{EXACT} {P2} --pipeline-schedule zb-h1 --save {tmp_path} --save-interval 3"
    whole = train(2, flags)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = of_engine(2, f"{EXACT} {P2} --pipeline-schedule zb-h1 --load {tmp_path} --save {tmp_path}/more")
    loaded = train(2, f"{EXACT} {P2} --pipeline-schedule zb-h1 --load {tmp_path}/more")
    expected = joined_weights(whole)
    for weights in (joined_weights(resumed), joined_weights(loaded)):
        assert all(torch.equal(tensor, weights[name]) for name, tensor in expected.items())
