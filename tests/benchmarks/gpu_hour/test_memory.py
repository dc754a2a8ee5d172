"""The part `memory` of the hour: which sizes it takes, what it counts, and that one size's end is not the part's."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron import backend

backend.install()
from benchmarks.gpu_hour import memory
from benchmarks.gpu_hour.memory import DOES_NOT, FITS, GIB, REHEARSAL, REHEARSED_GIB
from tests import workers
from tests.benchmarks.gpu_hour.fake_hour import Said

SIZE = replace(REHEARSAL.size, layers=3)


def train_case(short: bool = False, setting: str = "no recomputation") -> list[dict]:
    """What two tasks yield, one behind the other; in the first one memory is short in the second batch, if `short`."""
    import torch

    from megatron.pipeline.runtime.engine import PipelineEngine

    argv, run_batch, calls = SIZE.argv(*memory.SETTINGS[setting]), PipelineEngine.run_batch, []

    def failing(engine, *arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        return run_batch(engine, *arguments)

    PipelineEngine.run_batch = failing if short else run_batch
    try:
        first = memory.train(argv, store=None, start=lambda: None)
    finally:
        PipelineEngine.run_batch = run_batch
    torch.distributed.barrier()
    return [first, memory.train(argv, store=None, start=lambda: None)] if short else [first]


@pytest.mark.parametrize("setting", ["no recomputation", pytest.param("layers recomputed", marks=pytest.mark.full)])
def test_a_rank_has_what_the_dry_run_says(setting):
    """Weights and gradients to the byte, and the optimizer but for its counters of steps; the peak within a fifth of
    the estimate, by a meter that knows nothing of it. A search estimates the same.
    """
    [[found]] = workers.run(1, f"{__name__}:train_case", setting=setting)
    flags = memory.SETTINGS[setting]
    dry = memory.dry_run(SIZE.argv(*flags), REHEARSED_GIB)
    parts = dry.memory[0].parts
    assert found["weights_bytes"] == parts.weights
    assert found["gradients_bytes"] == pytest.approx(parts.gradients, rel=1e-3)  # padded
    assert found["optimizer_bytes"] == pytest.approx(parts.optimizer, rel=1e-3)
    assert found["peak_bytes"] == pytest.approx(dry.memory[0].total, rel=0.2)
    assert found["losses"][0] > found["losses"][-1] > 0 and len(found["losses"]) == memory.BATCHES
    assert memory.planners_bytes(SIZE, flags) == dry.memory[0].total


def test_short_memory_in_one_size_does_not_reach_the_next():
    """torch's error becomes a sentence and the peak until then, and the next task trains."""
    [[first, second]] = workers.run(1, f"{__name__}:train_case", short=True)
    assert (first["failed"], first["out_of_memory"]) == ("CUDA out of memory. Tried to allocate 2.00 GiB.", True)
    assert 0 < first["peak_bytes"] <= second["peak_bytes"] and len(first["losses"]) == 1
    assert "failed" not in second and len(second["losses"]) == memory.BATCHES


def test_depths_are_those_of_the_dry_run():
    """The least that take their part of the card; the last one that fits, and the next one."""
    plan, setting = replace(REHEARSAL, parts=(0.25, 0.6)), "layers recomputed"
    sizes = memory.chosen(plan, setting, REHEARSED_GIB)
    assert list(sizes) == ["25%", "60%", FITS, DOES_NOT]
    for name, part in (("25%", 0.25), ("60%", 0.6)):
        size, dry = sizes[name]
        less = memory.dry_run(replace(size, layers=size.layers - 1).argv(*memory.SETTINGS[setting]), REHEARSED_GIB)
        assert less.memory[0].total < part * REHEARSED_GIB * GIB <= dry.memory[0].total
    (last, fits), (first, too_many) = sizes[FITS], sizes[DOES_NOT]
    assert first.layers == last.layers + 1 and fits.verdict.fits and not too_many.verdict.fits


def planned(total: float, *, fits: bool = True) -> SimpleNamespace:
    """A dry run's finding of so many bytes."""
    parts = SimpleNamespace(
        weights=2.0,
        gradients=4.0,
        optimizer=12.0,
        activations=5.0,
        workspace=1.0,
        transfers=0.0,
        deferred=0.0,
        step=3.0,
    )
    rank = SimpleNamespace(parts=parts, total=total)
    return SimpleNamespace(memory=[rank], verdict=SimpleNamespace(fits=fits, word="fits" if fits else "out of memory"))


def test_meter_of_the_allocator(monkeypatch):
    """A peak is since the last call, and reserved bytes are the most of all; CUDA's calls are those of a stand-in."""
    from benchmarks.gpu_hour.meters import AllocatorMeter

    there = {"allocated": 5, "peak": 5, "reserved": 8}
    calls = {
        "max_memory_allocated": lambda: there["peak"], "max_memory_reserved": lambda: there["reserved"],
        "reset_peak_memory_stats": lambda: there.update(peak=there["allocated"]),
        "memory_stats": lambda: {"num_alloc_retries": 2},
    }  # fmt: skip
    for name, call in calls.items():
        monkeypatch.setattr(f"torch.cuda.{name}", call)
    reset = backend.reset_peak_memory
    with AllocatorMeter() as meter:
        there.update(peak=9, reserved=12)
        assert (meter.take(), meter.take()) == (9, 5)
        there.update(reserved=7)
        there.update(peak=11, reserved=14)
        backend.reset_peak_memory()  # as a rank whose weights live on the host does for each batch
        assert there["peak"] == 5
        there.update(reserved=7)
        assert meter.take() == 11
    assert (meter.reserved, meter.retries()) == (14, 2) and backend.reset_peak_memory is reset


RAN = {
    "weights_bytes": 2, "gradients_bytes": 4, "optimizer_bytes": 12, "computing_bytes": 25, "step_bytes": 20,
    "peak_bytes": 30, "reserved_bytes": 33, "losses": [1.0], "retries": 0,
}  # fmt: skip


def test_parts_are_set_against_the_estimate():
    """Activations are what the peak before a step has beyond what is kept, and the step's part likewise."""
    found = memory.compared(RAN, planned(24.0))
    assert found["ratio_to_estimate"] == 30 / 24
    assert (found["activations_bytes"], found["estimate_activations_bytes"]) == (25 - 18, 6.0)
    assert (found["step_extra_bytes"], found["estimate_step_bytes"]) == (20 - 18, 3.0)


def test_a_failed_size_is_told_and_others_go_on(monkeypatch):
    """Out of memory, and a process that died, become lines; the verdicts that they contradict are named at the end."""
    sizes = {"50%": (SIZE, planned(24.0)), FITS: (SIZE, planned(30.0)), DOES_NOT: (SIZE, planned(40.0, fits=False))}
    monkeypatch.setattr(memory, "chosen", lambda *arguments: sizes)
    monkeypatch.setattr(memory, "planners_bytes", lambda *arguments: 24.0)
    answers = iter([
        {"failed": "process 0 ended without an error message (status -9)", "out_of_memory": True},
        {"failed": "CUDA out of memory.", "out_of_memory": True, "peak_bytes": GIB, "reserved_bytes": GIB}, RAN,
    ])  # fmt: skip
    tasks, said = SimpleNamespace(do=lambda *_, **options: next(answers)), Said()
    rows = list(memory.measure(REHEARSAL, 1.0, tasks, said))
    assert [("failed" in row, row["fits"]) for row in rows] == [(True, True), (True, True), (False, False)]
    assert "out of memory: process 0 ended" in said.lines[0] and "out of memory at 1 GiB: CUDA" in said.lines[1]
    assert said.figures["no_recomputation_just_does_not_fit_ratio_to_estimate"] == 30 / 40
    assert memory.summary(rows).endswith(
        "contradicts: no recomputation, 50% did not run, no recomputation, just fits did not run, "
        "no recomputation, just does not fit ran"
    )
