"""The part `l2l` of the hour: contenders that train alike, memory that does not grow, and shares of hidden time."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.gpu_hour import l2l, l2l_tasks
from benchmarks.gpu_hour.l2l_contenders import FLUSH, FSDP2, FSDP2_AT_ONCE, L2L, NAMES
from megatron.pipeline.program.instruction import Instruction, Kind, Lane
from megatron.pipeline.runtime.contract.trace import COMPUTE, WAIT, TraceSpan
from tests import workers
from tests.benchmarks.gpu_hour.fake_hour import Said

SIZE = l2l.REHEARSAL.sizes[0]


def start() -> None:
    pass


def compare_case(fails: dict[str, int] | None = None, **options) -> dict:
    """The rounds of all contenders; `fails`: for which memory is short, and in which call of `train`."""
    import torch

    make = l2l_tasks.make

    def made(name, *arguments):
        contender, calls = make(name, *arguments), []
        train = contender.train

        def failing(num_batches):
            calls.append(num_batches)
            if fails and fails.get(name) == len(calls):
                raise torch.OutOfMemoryError("CUDA out of memory.\nmore")
            return train(num_batches)

        contender.train = failing
        return contender

    l2l_tasks.make = made
    try:
        return l2l_tasks.compare(SIZE, 2, 1, store=None, start=start, **options)
    finally:
        l2l_tasks.make = make


def device_case(names: tuple[str, ...], layers: tuple[int, ...]) -> dict:
    """Contender -> the device's peaks by depth."""
    sizes = [replace(SIZE, layers=count) for count in layers]
    return {
        name: [l2l_tasks.device_bytes(name, size, store=None, start=start)["peak_bytes"] for size in sizes]
        for name in names
    }


def overlap_case(file: str) -> dict:
    return l2l_tasks.overlap(SIZE, 2, file, store=None, start=start)


@pytest.mark.full
def test_contenders_train_alike():
    """l2l has flush's losses to the last bit; FSDP2's differ by less than a hundredth of what a step changes, also with
    the batch as one microbatch; each has a time for each round.
    """
    [found] = workers.run(1, f"{__name__}:compare_case")
    assert tuple(found) == NAMES
    flush = found[FLUSH]["losses"]
    assert len(flush) == 3 and flush[0] > flush[1] > flush[2]
    assert found[L2L]["losses"] == flush
    for name in (FSDP2, FSDP2_AT_ONCE):
        assert found[name]["losses"] == pytest.approx(flush, abs=0.01 * (flush[1] - flush[2]))
    assert all(len(each["seconds"]) == 2 and min(each["seconds"]) > 0 for each in found.values())


def test_others_go_on_where_memory_is_short():
    """FSDP2 in its first batch, flush in its second round: l2l has all rounds, and no ratio without flush."""
    [found] = workers.run(1, f"{__name__}:compare_case", fails={FSDP2: 1, FSDP2_AT_ONCE: 1, FLUSH: 3})
    said = Said()
    l2l.add_speed(said, SIZE, found)
    assert said.lines[0] == "flush, m = 2: out of memory: CUDA out of memory."
    assert len(said.lines) == len(NAMES) and len(said.figures["l2l_m2_tokens_per_second"]) == 2
    assert [name for name in said.figures if "ratio" in name] == []


def test_rounds_end_in_time():
    """After the first, where the time is over; contenders then have as many times as each other."""
    [found] = workers.run(1, f"{__name__}:compare_case", fails={FSDP2: 1, FSDP2_AT_ONCE: 1}, enough=0.0)
    assert [len(found[name]["seconds"]) for name in (FLUSH, L2L)] == [1, 1]


def test_device_memory_does_not_grow_with_depth():
    """l2l's peak is the same for twice the layers."""
    [found] = workers.run(1, f"{__name__}:device_case", names=(L2L,), layers=(3, 6))
    few, many = found[L2L]
    assert many == few > 0


@pytest.mark.full
def test_device_memory_of_others_is_measured_too():
    """flush's grows by 18 bytes a parameter and more."""
    [found] = workers.run(1, f"{__name__}:device_case", names=(FLUSH, FSDP2), layers=(3, 6))
    few, many = found[FLUSH]
    assert many - few > 18 * 3 * 12 * SIZE.hidden**2
    assert min(found[FSDP2]) > 0


def test_a_trace_has_the_lanes_and_only_the_last_batches(tmp_path):
    """Copies both ways and updates, each with a share between 0 and 1, and computation no longer than the trace."""
    [found] = workers.run(1, f"{__name__}:overlap_case", file=str(tmp_path / "trace.json"))
    assert set(found["lanes"]) == set(l2l_tasks.LANES) and (tmp_path / "trace.json").stat().st_size > 0
    assert all(0 <= lane["hidden_ratio"] <= 1 and lane["seconds"] > 0 for lane in found["lanes"].values())
    assert 0 < found["computing_seconds"] < found["seconds"]


def span(track: str, kind: Kind, start: float, end: float) -> TraceSpan:
    instruction = Instruction(kind, stage=0, microbatch=0 if kind is Kind.FORWARD else None)
    return TraceSpan(track, instruction, start, end)


def test_share_is_of_the_time_beside_computation():
    """A copy of 4 s, of which two computations cover 1 and 0.5; one that lies within; posting is no computation."""
    forward = Kind.FORWARD
    spans = [
        span(COMPUTE, forward, 1.0, 2.0), span(COMPUTE, forward, 3.5, 9.0), span(WAIT, forward, 2.0, 3.5),
        span(COMPUTE, Kind.FETCH, 0.0, 4.0),
        span(Lane.H2D.value, Kind.FETCH, 0.0, 4.0), span(Lane.D2H.value, Kind.STORE_GRAD, 5.0, 7.0),
    ]  # fmt: skip
    found = l2l_tasks.shares(spans)
    assert found["lanes"] == {
        "to_device": {"seconds": 4.0, "hidden_ratio": 1.5 / 4}, "from_device": {"seconds": 2.0, "hidden_ratio": 1.0},
    }  # fmt: skip
    assert (found["computing_seconds"], found["waiting_seconds"], found["seconds"]) == (6.5, 1.5, 9.0)


def test_depth_is_chosen_by_the_hosts_memory():
    """All contenders together take at most three quarters of it."""
    [size, _] = l2l.CARD.sizes
    assert l2l.fitting(size, 1e15) == size
    half = l2l.HOST_BYTES * (12 * size.hidden**2 * 3.5 + 2 * size.vocabulary * size.hidden) / 0.75
    assert l2l.fitting(size, half).layers == 3


def test_growth_and_the_largest_model_are_told():
    """Bytes a layer from the least and the greatest depth; a depth that failed is left out."""
    said = Said()
    answers = iter([{"peak_bytes": 4 << 20}, {"failed": "out of memory"}, {"peak_bytes": 10 << 20}])
    tasks = SimpleNamespace(do=lambda *_, **options: next(answers))
    peaks = l2l.depths(FLUSH, SIZE, (2, 4, 8), tasks, said)
    l2l.add_depth(said, FLUSH, peaks)
    assert said.figures["flush_bytes_a_layer"] == (6 << 20) / 6 and said.figures["flush_depth_layers"] == [2, 8]
    assert said.lines == [
        "flush with 4 layers, alone: out of memory",
        "Device peak of flush: 0.003906 GiB at 2 layers, 0.009766 GiB at 8 layers; a layer more takes 1 MiB",
    ]
