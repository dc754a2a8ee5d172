"""The chain's last link: one rank's overflow, stop request or loss is every rank's; the groups are the chain's own."""

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from megatron.pipeline.program.weight_policies import TWO_BW
from megatron.pipeline.runtime.contract.stage import BatchInfo
from megatron.pipeline.runtime.stages.megatron.update import MegatronWeightUpdate
from tests import workers
from tests.pipeline.runtime.stages.megatron import megatron_cases as cases

INFO = BatchInfo(index=0, num_microbatches=1, num_samples=2)


def updates(**options):
    return cases.Case(schedule="2bw", p=2, layers=2, hidden=16, batches=(2, 2), **options)


def one_batch(overflow_on: int | None = None, dtype: str = "float16", **options) -> dict:
    """A batch of gradients made by hand; on `overflow_on` one element is infinite."""
    rank = torch.distributed.get_rank()
    case = updates(dtype=dtype, **options)
    with cases.parallel(case):
        _, update = cases.build(case)
        update.begin_batch(INFO)
        update.begin_backward(INFO)
        for param in update.chunks[0].parameters():
            param.main_grad.fill_(update.loss_scale(0))
        if rank == overflow_on:
            next(iter(update.chunks[0].parameters())).main_grad.view(-1)[3] = torch.inf
        losses = {"lm loss": (6.0, 4.0)} if rank == 1 else {}
        before = {name: tensor.clone() for name, tensor in update.versions.tensors(0).items()}
        update.reduce_norm(1, 1 << rank, losses)
        report = update.step(1)
        after = update.versions.tensors(1)
        counted = sum(param.numel() for param in update._reduction.counted)
        return {
            "report": report,
            "changed": any(not torch.equal(before[name], after[name]) for name in before),
            "old_kept": all(torch.equal(before[name], tensor) for name, tensor in update.versions.tensors(0).items()),
            "slots": update.versions.num_slots,
            "scale": update.scales.current,
            "counted": counted,
            "elements": sum(p.numel() for p in update.chunks[0].parameters()),
            "num_steps": update.scheduler.num_steps,
            "grads_dropped": all(param.grad is None for param in update.chunks[0].parameters()),
        }


def all_cases() -> list[dict]:
    return [
        one_batch(overflow_on=0),
        one_batch(overflow_on=1),
        one_batch(),
        one_batch(overflow_on=0, dtype="float32"),
        one_batch(tied=True),
    ]


def rank_metrics() -> dict:
    """The report's rank_metrics of a batch for which each rank measures its own number."""
    rank = torch.distributed.get_rank()
    case = updates(dtype="float32")
    with cases.parallel(case):
        stages, update = cases.build(case)
        update = MegatronWeightUpdate(
            update.chunks, update.optimizer, weights=TWO_BW, num_stages=2, stage=stages[0].index,
            rank_metrics={"bytes": lambda: 2**40 + rank, "level": lambda: 0.5 * rank},
        )  # fmt: skip
        update.begin_batch(INFO)
        update.begin_backward(INFO)
        update.reduce_norm(1, 0, {"lm loss": (6.0, 4.0)})
        return update.step(1)


@pytest.fixture(scope="module")
def results():
    return workers.run(2, f"{__name__}:all_cases", timeout=100)


def test_what_ranks_measure_reaches_all_by_rank():
    """Every report holds every rank's values, exactly, beside the sums of losses."""
    for report in workers.run(2, f"{__name__}:rank_metrics"):
        assert report.rank_metrics == {"bytes": (2**40, 2**40 + 1), "level": (0.0, 0.5)}
        assert report.losses == {"lm loss": 1.5}


@pytest.mark.sample(1)
@pytest.mark.parametrize("overflow_on", [0, 1])
def test_an_overflow_on_one_stage_skips_the_step_on_all(results, overflow_on):
    """No rank steps, no slot is written or made, the next version is the old one, scale and schedule agree."""
    for rank in results:
        result = rank[overflow_on]
        assert result["report"].overflow and result["report"].skipped
        assert not result["changed"] and result["slots"] == 1
        assert result["scale"] == 512.0 and result["num_steps"] == 0


def test_a_good_batch_steps_everywhere(results):
    """Without overflow every rank makes the version in its second slot and keeps the first."""
    for rank in results:
        result = rank[2]
        assert not result["report"].skipped and result["changed"] and result["old_kept"]
        assert result["slots"] == 2 and result["num_steps"] == 2 and result["grads_dropped"]


def test_losses_and_stop_requests_of_any_rank_reach_all(results):
    """Sums over ranks: the loss of the last stage, and the union of the stop requests."""
    for rank in results:
        assert rank[2]["report"].losses == {"lm loss": 1.5}
        assert rank[2]["report"].stop_requests == 0b11


def test_every_element_counts_once(results):
    """Gradients of one everywhere: the squared norm is the number of the model's elements, a tied weight once."""
    for number in (2, 4):
        elements = sum(rank[number]["counted"] for rank in results)
        for rank in results:
            assert rank[number]["report"].grad_norm ** 2 == pytest.approx(elements, rel=1e-6)
    shared = cases.VOCABULARY * 16
    assert sum(rank[2]["counted"] for rank in results) == sum(rank[2]["elements"] for rank in results)
    assert sum(rank[4]["counted"] for rank in results) == sum(rank[4]["elements"] for rank in results) - shared


def test_without_a_loss_scale_bad_gradients_are_reported_not_skipped(results):
    """FP32: as in megatron.core the step is made, and the report says that numbers were not finite."""
    for rank in results:
        assert rank[3]["report"].nan and not rank[3]["report"].skipped


def refusals() -> list[str]:
    messages = []
    for change in (
        {"single_gradient_buffer": True, "dtype": "float16"},
        {"overlap_grad_reduce": True},
        {"average_in_collective": True},
    ):
        options = {key: value for key, value in change.items() if key in ("single_gradient_buffer", "dtype")}
        case = cases.Case(schedule="2bw", layers=1, **options)
        with cases.parallel(case):
            try:
                _, update = cases.build(case)
                chunk = update.chunks[0]
                if "overlap_grad_reduce" in change:
                    chunk.ddp_config.overlap_grad_reduce = True
                if "average_in_collective" in change:
                    chunk.ddp_config.average_in_collective = True
                cases.MegatronWeightUpdate([chunk], update.optimizer)
            except ValueError as error:
                messages.append(str(error))
    return messages


def test_what_cannot_be_exact_is_refused():
    """Loss scaling with one buffer, overlapped reductions and averages in them: each a sentence with the remedy."""
    messages = workers.run(1, f"{__name__}:refusals", timeout=60)[0]
    assert len(messages) == 3
    for message, word in zip(messages, ("second buffer", "overlap_grad_reduce", "average_in_collective"), strict=True):
        assert word in message
