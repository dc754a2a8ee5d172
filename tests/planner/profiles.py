"""Profiles of machines whose times are given by formulas, so that predictions have known answers."""

from datetime import datetime, timezone

from megatron.planner import Architecture
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.time.profile import (
    AllReduceTime,
    CopyTime,
    HostUpdateTime,
    Machine,
    Profile,
    Spread,
    StagePosition,
    StageTime,
    TransferTime,
    UpdateTime,
)

MODEL = Architecture(
    num_layers=4, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4, num_query_groups=4, kv_channels=16,
    sequence_length=32, vocabulary_size=128, num_positions=32,
)  # fmt: skip

LAYER, EMBEDDING, HEAD, OVERHEAD = 0.010, 0.002, 0.005, 0.001
"""Seconds of a forward of one sequence; overhead: of any stage. A backward takes twice as long."""
CONTENTION = 0.2
"""How much longer everything takes with each process more at work."""
UPDATE = 0.004
"""Seconds of a layer's update; embedding and head none."""
LATENCY, BANDWIDTH = 1e-4, 1e9
TO_HOST, HOST_LOOP, HOST_FUSED = 2e9, 60e-9, 6e-9
"""Bytes a second to a device (from there half), and seconds a parameter of the host's optimizer; contended alike."""


def forward(place: StagePosition, num_layers: int, size: int, working: int, tensor: int = 1) -> float:
    ends = EMBEDDING * (place in ("first", "only")) + HEAD * (place in ("last", "only"))
    return (OVERHEAD + size * (ends + LAYER * num_layers)) / tensor * (1 + CONTENTION * (working - 1))


OF_INPUT, OF_WEIGHT, DEFERRED = 1.25, 0.9, 1000
"""Seconds of I and W in those of a forward, and bytes of a layer between them."""


def _halves(place: StagePosition, num_layers: int, size: int, working: int, tensor: int) -> dict[str, object]:
    seconds = forward(place, num_layers, size, working, tensor)
    return {
        "backward_input": exactly(OF_INPUT * seconds), "backward_weight": exactly(OF_WEIGHT * seconds),
        "deferred_bytes": DEFERRED * num_layers,
    }  # fmt: skip


def exactly(seconds: float) -> Spread:
    return Spread(median=seconds, low=seconds, high=seconds, count=100)


def profile(
    *,
    tensors: tuple[int, ...] = (1, 2),
    sizes: tuple[int, ...] = (1, 4),
    counts: tuple[int, ...] = (1, 2, 4),
    scopes: tuple[str, ...] = ("none",),
    shares_processor: bool = True,
    halves: bool = False,
    **changes: object,
) -> Profile:
    """A profile of the machine above. `halves`: with I and W, which take 1.25 and 0.9 of a forward."""
    cases = [
        (place, layers, tensor, working)
        for place, layers in (("middle", 1), ("middle", 3), ("only", 1), ("first", 1), ("last", 1))
        for tensor in tensors
        for working in counts
        if working >= tensor
    ]
    stages = tuple(
        StageTime(
            place=place, num_layers=layers, tensor=tensor, micro_batch_size=size, recompute=RecomputeScope(scope),
            working=working, forward=exactly(forward(place, layers, size, working, tensor)),
            backward=exactly(2 * forward(place, layers, size, working, tensor)),
            **(_halves(place, layers, size, working, tensor) if halves else {}),
        )
        for place, layers, tensor, working in cases
        for size in sizes
        for scope in scopes
    )  # fmt: skip
    updates = tuple(
        UpdateTime(
            place=place, num_layers=layers, num_parameters=1000 * layers, tensor=tensor, weights=weights,
            working=working, zero=exactly(0.0), norm=exactly(0.0),
            step=exactly(UPDATE * layers * (2 if weights == "2bw" else 1)),
        )
        for place, layers, tensor, working in cases
        for weights in ("flush", "2bw")
    )  # fmt: skip
    sizes_in_bytes = (4096, 65536, 2**20)
    values = dict(
        created=datetime(2026, 11, 21, tzinfo=timezone.utc), architecture="gpt",
        flags=("--num-layers", "4", "--hidden-size", "64"), model=MODEL, dtype="float32", transformer_impl="local",
        sequence_parallel=False, processes=max(counts), shares_processor=shares_processor,
        machine=Machine(device="formulas", num_devices=4, threads=1, system="-", torch="2.13", megatron_core="0.16.1"),
        stages=stages, updates=updates,
        transfers=tuple(TransferTime(num_bytes=n, seconds=exactly(LATENCY + n / BANDWIDTH)) for n in sizes_in_bytes),
        all_reduces=tuple(
            AllReduceTime(ranks=ranks, num_bytes=n, seconds=exactly(2 * LATENCY + n / BANDWIDTH))
            for ranks in (2, 4)
            for n in sizes_in_bytes
        ),
        copies=tuple(
            CopyTime(
                direction=direction, num_bytes=n, working=working,
                seconds=exactly(n / rate * (1 + CONTENTION * (working - 1))),
            )
            for direction, rate in (("to device", TO_HOST), ("from device", TO_HOST / 2))
            for n in sizes_in_bytes
            for working in counts
        ),
        host_updates=tuple(
            HostUpdateTime(
                kernel=kernel, num_parameters=1000, working=working,
                seconds=exactly(1000 * seconds * (1 + CONTENTION * (working - 1))),
            )
            for kernel, seconds in (("loop", HOST_LOOP), ("fused", HOST_FUSED))
            for working in counts
        ),
    )  # fmt: skip
    return Profile(**values | changes)
