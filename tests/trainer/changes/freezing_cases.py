"""Runs that freeze layers, on the ranks: what tests watch in them, and how they compare with plain torch.

Tensors are under the names of the whole model, where layers count from 1.
"""

import hashlib
import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.trainer.checkpoint import writer
from tests import workers
from tests.trainer.run import run_case
from tests.trainer.run.run_case import joined_weights, numbered_names, train

FREEZES = (
    "--untie-embeddings-and-output-weights --clip-grad 0 --adam-eps 1e-5 --freeze-training --freeze-interval 2"
    " --train-iters 7"
)
"""The large epsilon lets the noise of gradients that should be zero stay noise."""
WATCH = f"{__name__}:watch"


@dataclass(frozen=True)
class Deviation:
    """The largest that are allowed: relative for losses and norms, absolute for weights and moments."""

    loss: float = 0.0
    norm: float = 0.0
    weight: float = 0.0


EXACT = Deviation(norm=1e-14)
"""Bit-equal; the norm's squares are added in another order, in float64."""
CLOSE = Deviation(loss=1e-6, norm=1e-6, weight=1e-5)
"""Microbatches or replicas add up in another order, or the factor that clips differs in its last bit."""
SPREAD = Deviation(loss=1e-6, norm=5e-6, weight=2e-5)
"""Tensor ranks split every product, so activations differ in their last bits, and the steps spread that."""


# In a worker.


def watch(run):
    """For `train_case`: reports by batch, digests of frozen weights behind each, the optimizer's state at the end."""
    report, reports, digests = run.reporter.iteration, [], []

    def watching(batch, progress) -> None:
        report(batch, progress)
        reports.append({"losses": batch.losses, "norm": batch.grad_norm, "layers": list(batch.layers_squared),
                        "num_frozen": _num_frozen(run), "scale": batch.loss_scale, "overflow": batch.overflow,
                        "lr": batch.learning_rate})  # fmt: skip
        digests.append(_frozen(run))

    run.reporter.iteration = watching
    return lambda: {"batches": reports, "digests": [*digests, _frozen(run)], "moments": moments(run),
                    "num_frozen": _num_frozen(run),
                    "saved_by_frozen": [run.engine.saved.peaks.get(stage.index, 0)
                                        for stage in run.stages if stage.is_frozen]}  # fmt: skip


def late_files(run):
    """For `train_case`: rank 0 writes the files of a checkpoint half a second late."""
    write = writer._write_files

    def late(*args):
        time.sleep(0.5 * (run.args.rank == 0))
        return write(*args)

    def end() -> None:
        writer._write_files = write

    writer._write_files = late
    return end


def refused(flags: str) -> str | None:
    """For what reason a run is refused that every rank refuses."""
    try:
        run_case.train_case(flags)
    except ValueError as error:
        return str(error)
    return None


def _num_frozen(run) -> int:
    return run.args.arrangement.num_frozen if run.args.arrangement else 0


def _frozen(run) -> dict[str, str]:
    from megatron.core.utils import unwrap_model

    return {
        name: hashlib.blake2b(each.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for stage in run.stages
        if stage.is_frozen
        for name, each in numbered_names(unwrap_model(stage.model))
    }


def moments(run) -> dict[str, dict]:
    """Each trained parameter's state, where the rank has it whole."""
    from megatron.core.utils import unwrap_model
    from megatron.pipeline.runtime.stages.megatron.optimizers import optimizers_of

    [inner] = optimizers_of(run.optimizer)
    names = {each: name for chunk in run.chunks for name, each in numbered_names(unwrap_model(chunk))}
    if (
        inner.optimizer is None
        or hasattr(inner, "model_param_group_index_map")
        or run.args.tensor_model_parallel_size > 1
    ):
        return {}
    if hasattr(inner, "float16_groups"):
        pairs = [pair for halves, masters in zip(inner.float16_groups, inner.fp32_from_float16_groups, strict=True)
                 for pair in zip(halves, masters, strict=True)]  # fmt: skip
    else:
        pairs = [(each, each) for group in inner.optimizer.param_groups for each in group["params"]]
    return {names[model]: {key: value.clone() if isinstance(value, Tensor) else value
                           for key, value in inner.optimizer.state[master].items()}
            for model, master in pairs}  # fmt: skip


# In the test.


def train_watched(num_ranks: int, flags: str, **options) -> list[dict]:
    """A run of `FREEZES` and `flags`."""
    return train(num_ranks, f"{FREEZES} {flags}", watch=WATCH, **options)


def reference(flags: str, *, replicas: int = 1, data: str | None = None, **options) -> dict:
    """The same of plain torch; `flags` without degrees."""
    flags = f"{FREEZES} {flags} {data or run_case.data_flags()}"
    [found] = workers.run(
        1, "tests.trainer.changes.freezing_reference:reference", flags=flags, replicas=replicas, **options
    )
    return found


def assert_same(results: list[dict], expected: dict, allowed: Deviation) -> None:
    """A whole run against the reference: every batch on every rank, decisions, weights, moments, counters of steps."""
    for result in results:
        batches = result["watched"]["batches"]
        assert len(batches) == len(expected["batches"])
        for ours, theirs in zip(batches, expected["batches"], strict=True):
            assert [ours[name] for name in ("num_frozen", "overflow", "scale")] == [
                theirs[name] for name in ("num_frozen", "overflow", "scale")
            ], (ours, theirs)
            for name, loss in theirs["losses"].items():
                assert math.isclose(ours["losses"][name], loss, rel_tol=allowed.loss), (name, ours, theirs)
            if not theirs["overflow"]:
                assert math.isclose(ours["norm"], theirs["norm"], rel_tol=allowed.norm), (ours, theirs)
                for mine, other in zip(ours["layers"], theirs["layers"], strict=True):
                    assert math.isclose(mine, other, rel_tol=2 * allowed.norm), (ours, theirs)
        assert_unmoved(result)
    weights = joined_weights(results)
    assert weights.keys() == expected["weights"].keys()
    for name, tensor in weights.items():
        _assert_near(tensor, expected["weights"][name], allowed, name)
    for result in results:
        for name, state in result["watched"]["moments"].items():
            assert state.keys() == expected["moments"][name].keys()
            for key, value in state.items():
                _assert_near(torch.as_tensor(value), torch.as_tensor(expected["moments"][name][key]), allowed, name)


def assert_unmoved(result: dict) -> None:
    """Not by a bit, Adam and weight decay included; and nothing of what is frozen was saved for a backward."""
    *before, last = result["watched"]["digests"]
    for each in before:
        assert all(last.get(name, digest) == digest for name, digest in each.items())
    assert not any(result["watched"]["saved_by_frozen"])


def _assert_near(ours: Tensor, theirs: Tensor, allowed: Deviation, name: str) -> None:
    difference = (ours.float() - theirs.float()).abs().max().item()
    assert difference <= allowed.weight, f"{name}: {difference}"
