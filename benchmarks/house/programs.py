"""The frozen outputs of schedules: rows with their proofs, the checker's errors for wrong rows, and simulated times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import combinations, product
from typing import Any

from megatron.pipeline.check import CheckReport, check, check_periodic
from megatron.pipeline.program.edges import Edge
from megatron.pipeline.program.instruction import Rows
from megatron.pipeline.program.lane_order import DEFERRED, EAGER, HOST, Residency
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import POLICIES
from megatron.pipeline.schedules import ORDERS, PRESETS, Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs

STAGES, MICROBATCHES, VIRTUAL = (2, 3, 4), (1, 2, 3, 4), (1, 2)
NUM_BATCHES = 3
CHOICES: dict[str, dict[str, Any]] = {
    "recompute": {"recompute": True},
    "extra warm-up": {"extra_warmup": True},
    "balance": {"balance": True},
    "tied embeddings": {"tied_embeddings": True},
    "data parallel": {"data_parallel": True},
    "norm decides": {"norm_decides": True},
    "predict": {"predict": True},
    "read one": {"provisional_microbatches": 1},
    "reduce partial": {"reduce_partial": True},
    "one frozen": {"num_frozen": 1},
    "groups of four": {"microbatch_group_size": 4},
    "shared ranks": {"rank_of_stage": (0, 1, 1, 0)},
    "graph": {"edges": (Edge(0, 1), Edge(0, 2), Edge(1, 3), Edge(2, 3))},
    "eager host": {"residency": Residency(1, EAGER)},
    "stash on host": {"residency": Residency(2, DEFERRED, HOST)},
}
"""Name -> choices of a schedule, which are tried alone and in pairs."""
WRONG = {
    "gpipe": ("gpipe", 2, (2,), {}),
    "flush": ("flush", 2, (2, 2), {"data_parallel": True, "tied_embeddings": True}),
    "2bw": ("2bw", 2, (2, 2, 2), {}),
    "provisional": ("2bw", 2, (2, 2, 2), {"predict": True, "provisional_microbatches": 1, "data_parallel": True}),
    "pipedream": ("pipedream", 3, (1,) * 4, {}),
    "interleaved": ("interleaved", 4, (2, 2), {"num_virtual_stages": 2}),
    "bpipe": ("bpipe", 4, (4,), {}),
    "zb-h1": ("zb-h1", 2, (3,), {}),
    "zbv": ("zbv", 4, (2,), {"num_virtual_stages": 2}),
    "l2l": ("l2l", 4, (2,), {"num_virtual_stages": 2, "residency": Residency(2, EAGER, HOST)}),
}
"""Programs that are made wrong at each instruction: name -> preset, stages, batches, choices."""


def programs() -> dict[str, Any]:
    """The rows and proofs of each preset, and of each order with each policy; or the reason of the refusal."""
    found = {}
    for name, p, m, v in product(PRESETS, STAGES, MICROBATCHES, VIRTUAL):
        if (schedule := _preset(name, p, v)) is not None:
            found[f"{name} p={p} m={m} v={v}"] = _frozen(schedule, m, periods=True)
    for order, policy, p, m, v in product(ORDERS, POLICIES, STAGES, MICROBATCHES, VIRTUAL):
        choices = {"num_stages": p * v, "num_virtual_stages": v, "recompute": POLICIES[policy].ahead is not None}
        schedule = _refused(Schedule, order=order, weights=policy, **choices)
        if isinstance(schedule, Schedule):
            found[f"order {order} weights {policy} p={p} m={m} v={v}"] = _frozen(schedule, m)
        elif m == MICROBATCHES[0]:
            found[f"order {order} weights {policy} p={p} v={v}"] = schedule
    return found


def choices() -> dict[str, Any]:
    """The rows and proofs of presets, and of asynchronous stages, on four stages, with each choice and each pair of
    choices."""
    found = {}
    for names in [(), *combinations(CHOICES, 1), *combinations(CHOICES, 2)]:
        taken = {key: value for name in names for key, value in CHOICES[name].items()}
        for name, preset in PRESETS.items():
            virtual = {} if "rank_of_stage" in taken or not preset.interleaves else {"num_virtual_stages": 2}
            schedule = _refused(Schedule.preset, name, num_stages=4, **taken, **virtual)
            label = " + ".join((name, *names))
            found[label] = _frozen(schedule, 8, num_batches=2) if isinstance(schedule, Schedule) else schedule
        if "predict" not in taken:
            schedule = _refused(Schedule, order="async", weights="stale", num_stages=4, **taken)
            label = " + ".join(("async", *names))
            found[label] = _frozen(schedule, 2, num_batches=2) if isinstance(schedule, Schedule) else schedule
    return found


def wrong_programs() -> dict[str, Any]:
    """The checker's errors for programs in which an instruction is missing, doubled, or swapped with the next one."""
    found = {}
    for name, (preset, num_stages, batches, given) in WRONG.items():
        program = Schedule.preset(preset, num_stages=num_stages, **given).build(batches)
        said = {}
        for label, rows in _mutants(program.rows):
            said[label] = _verdict(program.with_rows(rows))
        bound = [most - 1 for most in check(program).peak_saved_microbatches]
        said["less memory"] = _refused(check, program, max_saved=bound)
        found[name] = said
    return found


def simulated() -> dict[str, Any]:
    """The simulated ends, bubbles and steady periods at fixed costs; for four stages also the end of each
    instruction."""
    found = {}
    for name, p, v in product(PRESETS, STAGES, VIRTUAL):
        if (schedule := _preset(name, p, v)) is not None:
            found[f"{name} p={p} v={v}"] = _times(schedule, full=p == STAGES[-1])
    for order, policy in product(ORDERS, POLICIES):
        choices = {"num_stages": 4, "recompute": POLICIES[policy].ahead is not None}
        schedule = _refused(Schedule, order=order, weights=policy, **choices)
        if isinstance(schedule, Schedule):
            found[f"order {order} weights {policy}"] = _times(schedule, full=False)
    return found


def _preset(name: str, p: int, v: int) -> Schedule | None:
    """The schedule of a preset on p ranks with v stages each; None if the preset does not support v."""
    if not PRESETS[name].interleaves:
        return Schedule.preset(name, num_stages=p) if v == 1 else None
    schedule = _refused(Schedule.preset, name, num_stages=p * v, num_virtual_stages=v)
    return schedule if isinstance(schedule, Schedule) else None


def _frozen(schedule: Schedule, m: int, *, num_batches: int = NUM_BATCHES, periods: bool = False) -> dict[str, Any]:
    batches = (m,) * num_batches
    program = _refused(schedule.build, batches)
    if not isinstance(program, Program):
        return program
    found = {
        "weights": schedule.name_of_weights,
        "rows": _texts(program.rows),
        "proof": _proof(check, program),
        "in flight": schedule.max_in_flight,
        "saved": schedule.max_saved_microbatches(batches),
        "saved on rank": schedule.max_saved_on_rank(batches),
        "evicting": schedule.evicting_ranks(batches),
        "report lag": schedule.report_lag,
        "settling batches": schedule.settling_batches,
    }
    periodic = _refused(schedule.build_periodic, m)
    found["proof of any number"] = periodic if isinstance(periodic, dict) else _proof(check_periodic, periodic)
    if periods:
        found |= {part: _texts(getattr(periodic, part)) for part in ("fill", "period", "drain")}
        found["evaluation"] = _texts(schedule.build_evaluation(m, version=3, first_microbatch=7).rows)
        found["later"] = _texts(schedule.build(batches, first_batch=2, first_microbatch=5).rows)
    return found


def _times(schedule: Schedule, *, full: bool) -> dict[str, Any]:
    m = next((m for m in (schedule.num_ranks, 1) if _accepts(schedule, m)), None)
    if m is None:
        return {"refused": "batches of one microbatch, and of as many as ranks"}
    program = _refused(schedule.build, (m,) * (2 * NUM_BATCHES))
    if not isinstance(program, Program):
        return program
    found = {}
    for name, costs in _costs(schedule.num_stages).items():
        timeline = simulate(program, costs)
        found[name] = {
            "end": timeline.end,
            "bubble": timeline.bubble,
            "idle": [timeline.idle(rank) for rank in range(timeline.num_ranks)],
            "batch starts": timeline.batch_starts(),
            "steady": _refused(timeline.steady_time_per_batch),
        }
        if full:
            found[name]["ends"] = [list(ends) for ends in timeline.ends]
    return found


def _costs(num_stages: int) -> dict[str, Costs]:
    slower = [1 + stage % 3 / 7 for stage in range(num_stages)]
    return {
        "the paper's": Costs(),
        "uneven": Costs(
            forward=slower, backward=[2.1 * each for each in slower], step=0.3, predict=0.2, hold=0.05, latency=0.11,
            forward_bytes=1.0, bandwidth=3.0, evict=0.4, offload=0.3, fetch=0.7, store=0.6, update=0.9, reduce_grad=1.3,
            reduce_embed=0.45, reduce_norm=0.15,
        ),
        "sender waits": Costs(forward_bytes=1.0, backward_bytes=0.5, bandwidth=2.5, latency=0.2, overlap=False),
    }  # fmt: skip


def _mutants(rows: Rows) -> Iterator[tuple[str, Rows]]:
    for rank, row in enumerate(rows):
        for at, instruction in enumerate(row):
            changed = {"missing": row[:at] + row[at + 1 :], "twice": row[: at + 1] + row[at:]}
            if at + 1 < len(row):
                changed["behind the next"] = (*row[:at], row[at + 1], instruction, *row[at + 2 :])
            for how, other in changed.items():
                yield f"rank {rank}, {at}, {instruction} {how}", (*rows[:rank], other, *rows[rank + 1 :])


def _proof(prove: Callable[..., CheckReport], program: object) -> dict[str, Any]:
    found = _refused(prove, program)
    return found if isinstance(found, dict) else asdict(found)


def _verdict(program: Program) -> object:
    said = _refused(check, program)
    return said if isinstance(said, dict) else "proved"


def _refused(make: Callable[..., Any], *arguments: object, **choices: object) -> Any:
    """Call `make`. Returns its result, or the reason of its ValueError, or the message of a failed assertion, which is
    a bug."""
    try:
        return make(*arguments, **choices)
    except ValueError as error:
        return {"refused": str(error).splitlines()}
    except AssertionError as error:
        return {"assertion": str(error)}


def _accepts(schedule: Schedule, m: int) -> bool:
    return not isinstance(_refused(schedule.validate, m), dict)


def _texts(rows: Rows) -> list[str]:
    return [" ".join(map(str, row)) for row in rows]
