"""Schedules and runs for property tests: any order, policy and flags; batches of varying size; any place of a run."""

import math
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from megatron.pipeline.program.instruction import Instruction, Kind, Row
from megatron.pipeline.program.lane_order import DEFERRED, EAGER, Residency
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import PROVISIONAL, STASH, TWO_BW, WeightPolicy
from megatron.pipeline.schedules import Schedule

IN_A_V = ("v-half", "v-min")  # always with two stages on each rank
PRESETS = (
    "gpipe", "flush", "2bw", "pipedream", "interleaved", "zb-h1", "zb-h2", "interleaved-zb", "zbv", *IN_A_V, "l2l",
)  # fmt: skip
DELAYED = (WeightPolicy("3bw", delay=2), WeightPolicy("4bw", delay=3))
"""Policies that no preset has, in place of 2bw's."""


@dataclass(frozen=True)
class Run:
    """A schedule and the batches that it runs, from a place of a run on."""

    schedule: Schedule
    batches: tuple[int, ...]
    first_batch: int
    first_microbatch: int

    def build(self) -> Program:
        return self.schedule.build(self.batches, first_batch=self.first_batch, first_microbatch=self.first_microbatch)


@st.composite
def schedules(
    draw: st.DrawFn, *, max_stages: int = 8, presets: tuple[str, ...] = PRESETS, balances: bool = True,
    reads: tuple[int | None, ...] = (None, 0, 1),
) -> Schedule:  # fmt: skip
    """`reads`: the numbers of microbatches that predictions may read."""
    name, num_stages = draw(st.sampled_from(presets)), draw(st.integers(1, max_stages))
    num_stages += num_stages % 2 if name in IN_A_V else 0
    flags = {"recompute": draw(st.booleans()), "data_parallel": draw(st.booleans())}
    if name == "l2l":
        flags["residency"] = Residency(draw(st.integers(1, 3)), draw(st.sampled_from((EAGER, DEFERRED))))
    if name in ("interleaved", "interleaved-zb", "l2l"):
        flags["num_virtual_stages"] = draw(st.sampled_from([v for v in (2, 3, 4, 1) if num_stages % v == 0]))
    if name == "zbv":
        flags["num_virtual_stages"] = draw(st.sampled_from([v for v in (2, 1) if num_stages % v == 0]))
    if name != "pipedream":
        flags["tied_embeddings"] = draw(st.booleans())
    if name in ("flush", "2bw"):
        flags["extra_warmup"] = draw(st.booleans())
    if balances and name in ("flush", "2bw", "interleaved"):
        flags["balance"] = draw(st.booleans())
    schedule = Schedule.preset(name, num_stages=num_stages, **flags)
    if name in ("zb-h1", "zb-h2"):
        schedule = replace(schedule, weights=draw(st.sampled_from((schedule.weights, TWO_BW, *DELAYED))))
    if name == "2bw":
        schedule = replace(schedule, weights=draw(st.sampled_from((schedule.weights, PROVISIONAL, *DELAYED))))
    if schedule.weights is PROVISIONAL:
        num_read, reduces = draw(st.sampled_from(reads)), draw(st.booleans())
        schedule = replace(schedule, provisional_microbatches=num_read, reduce_partial=reduces and num_read != 0)
    return schedule


def fewest_microbatches(schedule: Schedule) -> int:
    """The smallest batch that a schedule runs, by the paper's condition m >= p (2p-1 with the longer warm-up), which k
    batches share where weights are k batches old and nothing is balanced.
    """
    if not schedule.weights.delay:
        return 1
    twice = schedule.extra_warmup or schedule.order == "zb-h2"
    in_flight = 2 * schedule.num_stages - 1 if twice else schedule.num_stages
    return in_flight if schedule.balance else math.ceil(in_flight / schedule.weights.delay)


def sizes(schedule: Schedule, more: int = 6) -> st.SearchStrategy[int]:
    """Batches that the schedule can run, up to so many microbatches `more` than the fewest."""
    if schedule.weights is STASH:
        return st.just(1)
    fewest = fewest_microbatches(schedule)
    if schedule.order in ("interleaved", "interleaved-zb") and schedule.num_virtual_stages > 1:
        return st.integers(1, max(1, 2 * more // 3)).map(lambda groups: groups * schedule.num_ranks)
    return st.integers(fewest, fewest + more)


@st.composite
def runs(draw: st.DrawFn, *, more: int = 6, max_batches: int | None = None, **choices: object) -> Run:
    """`choices`: those of `schedules`."""
    schedule = draw(schedules(**choices))
    longest = max_batches or (3 * schedule.num_stages if schedule.weights is STASH else 4)
    batches = tuple(draw(st.lists(sizes(schedule, more), min_size=1, max_size=longest)))
    first_batch = draw(st.integers(0, 4))
    first_microbatch = draw(st.integers(first_batch, 40)) if first_batch else 0
    return Run(schedule, batches, first_batch, first_microbatch)


def kinds_of(row: Row, *kinds: Kind) -> list[Instruction]:
    """The instructions of these kinds."""
    return [instruction for instruction in row if instruction.kind in kinds]


def text(row: Row) -> str:
    """A row as words, to compare with what a test writes down."""
    return " ".join(map(str, row))
