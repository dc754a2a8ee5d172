"""How long a batch takes in closed form: a row for each order that has one.

Notation: w is a microbatch's forward and backward at a stage, c a transfer (bytes / bandwidth + latency) over an edge.

    gpipe          drains      sum of w and 2 c over all stages and edges, for the first microbatch, and (m - 1) rates,
                               each the longest forward and the longest backward
    1f1b           drains      m w of its slowest stage, w and 2 c of those before, and where it waits at first and last
                   overlaps    m rates: nothing fills or drains
                   alone       1 rate: every microbatch is a batch, whose reductions its STEP waits for at once
    interleaved    drains      m times a rank's w over all its stages, and the same

microbatch_flow.py says how microbatches take their way, and when a form does not hold, and is None; batch_end.py what
shows of reductions and updates behind them.

A relay on one rank with N stages that are alike, weights on the host and eager updates, of X, G, R and U for a stage's
fetch, store, reduction and update (docs/schedules_l2l.md; without the update this is what L2L's equation 4 counts):

    X + (N - 1) max(m f, X) + m w + (N - 1) max(m r, G, R, U) + R + G + U

r is a recompute and a backward, f a forward, w a forward and a backward. It holds where fetches beside backwards are
hidden, X <= m w and m r, and two gradient buffers are enough, (m r + R + G)/2 <= max(m r, G, R, U). All else is
simulated.
"""

from collections.abc import Callable, Mapping
from operator import add

from megatron.pipeline.program.lane_order import EAGER, Residency
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.schedules.gpipe import GPipe
from megatron.pipeline.schedules.interleaved import Interleaved
from megatron.pipeline.schedules.one_f_one_b import OneForwardOneBackward
from megatron.pipeline.schedules.order import Order
from megatron.pipeline.schedules.relay import Relay
from megatron.planner.time.batch_end import Chain, end_of_batch, partial_shown
from megatron.planner.time.microbatch_flow import busy_at, busy_at_rank, flow, keeps_up, passage, round_trips
from megatron.planner.time.stage_times import StageTimes, hides_moves

ClosedForm = Callable[[StageTimes, int], float | None]
"""Seconds of a batch of so many microbatches, from its beginning to where the next one is as far; None: it holds not
for such times."""


def closed_form_of(schedule: Schedule) -> ClosedForm | None:
    """The closed form that holds for a schedule; None: its programs have to be simulated."""
    recomputes = schedule.recompute and schedule.residency is None
    if schedule.extra_warmup or recomputes or schedule.microbatch_group_size not in (None, schedule.num_ranks):
        return None
    if schedule.reduce_partial and schedule.tied_embeddings and schedule.provisional_microbatches is None:
        return None  # the last stage's two partial reductions wait for the first's one after the other
    forms = CLOSED_FORMS.get(schedule.order_class, {})
    return next((form for policies, form in forms.items() if getattr(schedule.weights, policies)), None)


# --- the forms


def gpipe(stages: StageTimes, m: int) -> float:
    forward = max(flow(stages.forward, stages.arrival_forward, stages.occupation))
    backward = max(flow(stages.backward, stages.arrival_backward, stages.occupation))
    return sum(passage(stages)) + (m - 1) * (forward + backward) + end_of_batch(stages) + stages.longest_step


def one_f_one_b(stages: StageTimes, m: int) -> float | None:
    p, row, rate = len(stages.work), max(stages.work), round_trips(stages)
    if not keeps_up(rate, row) or not hides_moves(stages):
        return None
    # Once the first p microbatches are under way, round trips decide that are a little slower than any stage.
    late = (rate - row) * max(0.0, m - p * p / (p - 1)) if p > 1 else 0.0
    return max(busy_at(stages, m)) + late + end_of_batch(stages) + stages.longest_step


def one_f_one_b_overlapped(stages: StageTimes, m: int) -> float | None:
    """The time with weights of a delay of one batch and more."""
    rate = max(stages.work)
    if not keeps_up(round_trips(stages), rate) or not hides_moves(stages):
        return None
    seconds, late, longest = _overlapped(stages, m, rate)
    most = max(longest, m * rate + stages.longest_update(m) + late)
    if not keeps_up(most, seconds) and any(map(_differ, (stages.forward, stages.backward, stages.arrival_forward[1:]))):
        return None  # stages that differ wait for one another's updates
    return longest


def _overlapped(stages: StageTimes, m: int, rate: float) -> tuple[float, float, float]:
    """Seconds of a batch, those by which the STEP is late, and seconds with what predictions wait for."""
    chains = [Chain(stages, stage, m) for stage in range(len(stages.work))]
    seconds, late = max(each.seconds for each in chains), max(each.late for each in chains)
    shown, late = partial_shown(stages, m, late), max(0.0, late)
    return seconds, late, max(seconds, m * rate + stages.updates(m)[0] + late + shown) if shown else seconds


def one_f_one_b_alone(stages: StageTimes, m: int) -> float:
    """The time with stages that update alone, after every microbatch."""
    alone = [*map(add, stages.reduce, stages.step)]
    received = zip(stages.backward, alone, stages.arrival_backward, strict=True)  # receives stand behind the STEP
    return max(round_trips(stages, [*map(add, alone, stages.arrival_forward)]), *map(sum, received))


def interleaved(stages: StageTimes, m: int) -> float | None:
    p, v = stages.schedule.num_ranks, stages.schedule.num_virtual_stages
    if v == 1:
        return one_f_one_b(stages, m)
    slowest = max(stages.arrival_forward + stages.arrival_backward)
    if slowest > min(stages.forward + stages.backward) or not hides_moves(stages):
        return None
    ahead = [2 * (p - 1 - rank) + (v - 1) * p + 1 for rank in range(p)]  # forwards before the first backward
    ranks = [rank for rank in range(p) if ahead[rank] <= m * v]
    by_turn = sum(max(stages.work[first : first + p]) for first in range(0, p * v, p))
    if m > p and not keeps_up(by_turn, stages.by_rank(stages.work)[-1]):
        return None  # ranks wait while one before the last takes a group through a slow stage
    return max(busy_at_rank(stages, m, ranks)) + end_of_batch(stages) + stages.longest_step


def relay(stages: StageTimes, m: int) -> float | None:
    """The time on one rank with eager updates and two resident stages, all alike; see the module."""
    schedule, n = stages.schedule, stages.schedule.num_stages
    is_plain = schedule.residency == Residency(2, EAGER) and schedule.num_ranks == 1 < n
    if not is_plain or schedule.tied_embeddings or any(map(_differ, _of_relay(stages))) or max(stages.step):
        return None
    fetch, store, reduce, update = stages.fetch[0], stages.store[0], stages.reduce[0], stages.update[0]
    up, turn, down = m * stages.forward[0], m * stages.work[-1], m * (stages.work[0] - stages.forward[0])
    bottleneck = max(down, store, reduce, update)
    if fetch > min(down, turn) or (down + reduce + store) / 2 > bottleneck:
        return None
    once = fetch + (n - 1) * max(up, fetch) + turn
    return once + (n - 1) * bottleneck + reduce + store + max(update, stages.reduce_norm)


CLOSED_FORMS: dict[type[Order], Mapping[str, ClosedForm]] = {
    GPipe: {"drains": gpipe},
    OneForwardOneBackward: {
        "drains": one_f_one_b, "overlaps_updates": one_f_one_b_overlapped, "updates_alone": one_f_one_b_alone,
    },
    Interleaved: {"drains": interleaved},
    Relay: {"drains": relay},
}  # fmt: skip
"""Class of an order -> property of the weight policies for which it has one -> closed form.

An order that is not here, or not with its policy, is simulated. Whoever brings an order may enter it.
"""


def _of_relay(stages: StageTimes) -> tuple[list[float], ...]:
    return stages.forward, stages.backward, stages.fetch, stages.store, stages.reduce, stages.update


def _differ(values: list[float]) -> bool:
    return bool(values) and max(values) - min(values) > 1e-12 * max(values)
