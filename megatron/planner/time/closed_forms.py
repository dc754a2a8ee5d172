"""The time of a batch in closed form, for each order that has a closed form.

Notation: w is a microbatch's forward and backward at a stage, c a transfer (bytes / bandwidth + latency) over an edge.

    gpipe          drains      sum of w and 2 c over all stages and edges, for the first microbatch, and (m - 1) rates,
                               each the longest forward and the longest backward
    1f1b           drains      m w of the slowest stage, w and 2 c of the stages before it, and its waits at the first
                               and the last microbatch
                   overlaps    m rates: nothing fills or drains
                   alone       1 rate: every microbatch is a batch, and its STEP waits for the reductions at once
    interleaved    drains      m times a rank's w over all its stages, and the same further terms

microbatch_flow.py describes how microbatches pass the pipeline and when a form does not hold (and returns None).

Weights on the host: a relay on one rank with N equal stages and eager updates, where X, G, R and U are a stage's fetch,
store, reduction and update (docs/schedules_l2l.md; without the update this is equation 4 of L2L):

    X + (N - 1) max(m f, X) + m w + (N - 1) max(m r, G, R, U) + R + G + U

Here f is a forward, r a recompute and a backward, and w a forward and a backward without a recompute, at the last
stage. The form holds if fetches beside backwards are hidden, X <= m w and X <= m r, and two gradient buffers are
enough, (m r + R + G)/2 <= max(m r, G, R, U). All other cases are simulated.

The end of a batch is the part of its reductions and of its update that lengthens the batch. A batch has m microbatches,
the pipeline p stages; f is a forward, b a backward. After the last backward come the reductions and the optimizer's
step. A stage that ends early reduces early. Policies that overlap updates (2bw: delay k = 1) hide the reductions behind
the next batches. Batch j's last backward at stage s comes p - 1 - s microbatches after its last forward there. This is
in batch j + q, r microbatches after the beginning of that batch, where (p - 1 - s) = (q - 1) m + r and 1 <= r <= m. The
first stage needs the STEP when batch j + k + 1 begins, which is n = k + 1 - q batches after batch j + q. So the chain
of stage s is hidden in a window of n (m w + step) - step - r w - s f. The excess shows once in n batches. Only one
chain runs at a time, so a batch takes at least as long as a chain. With 2bw the window is (m - p + 1) w + s b. The last
stage of 2bw ends its batches before the wait (q = 0). So the wait hides its reductions as well, and its excess shows in
every other batch.

Weights that predict add PREDICT to a stage's batch, and HOLD at its place. The last stage's chain begins behind its
PREDICT, so q = 1 and r = 0 there. Then n = 1 at all stages, and HOLD lies in the window, too. The reductions for a
prediction, over replicas or between both ends, begin when the backwards that it reads are done and the chain before has
ended. They run beside the computation until the STEP and beside the STEP. The rest shows.
"""

from collections.abc import Callable, Mapping
from operator import add

from megatron.pipeline.program.lane_order import EAGER, Residency
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.schedules.interleaved import Interleaved, Relay
from megatron.pipeline.schedules.one_f_one_b import GPipe, OneForwardOneBackward
from megatron.pipeline.schedules.order import Order
from megatron.planner.time.microbatch_flow import (
    StageTimes,
    busy_at,
    busy_at_rank,
    flow,
    hides_moves,
    keeps_up,
    passage,
    round_trips,
)

ClosedForm = Callable[[StageTimes, int], float | None]
"""(stage times, microbatches of a batch) -> seconds from the beginning of a batch to the beginning of the next; None if
the form does not hold for these times."""


def closed_form_of(schedule: Schedule) -> ClosedForm | None:
    """Return the closed form of a schedule; None if its programs have to be simulated."""
    recomputes = schedule.recompute and schedule.residency is None
    if schedule.extra_warmup or recomputes or schedule.microbatch_group_size not in (None, schedule.num_ranks):
        return None
    if schedule.reduce_partial and schedule.tied_embeddings and schedule.provisional_microbatches is None:
        return None  # the last stage's two partial reductions wait in turn for those of the first stage
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
    # Behind the first p microbatches, a round trip that is slightly slower than any stage determines the rate.
    late = (rate - row) * max(0.0, m - p * p / (p - 1)) if p > 1 else 0.0
    return max(busy_at(stages, m)) + late + end_of_batch(stages) + stages.longest_step


def one_f_one_b_overlapped(stages: StageTimes, m: int) -> float | None:
    """Return the time if weights have a delay of one batch or more."""
    rate = max(stages.work)
    if not keeps_up(round_trips(stages), rate) or not hides_moves(stages):
        return None
    seconds, late, longest = _overlapped(stages, m, rate)
    most = max(longest, m * rate + stages.longest_update(m) + late)
    if not keeps_up(most, seconds) and any(map(_differ, (stages.forward, stages.backward, stages.arrival_forward[1:]))):
        return None  # unequal stages wait for one another's updates
    return longest


def _overlapped(stages: StageTimes, m: int, rate: float) -> tuple[float, float, float]:
    """Return the seconds of a batch, the seconds by which its STEP is late, and the batch's seconds with the waits of
    predictions.
    """
    chains = [Chain(stages, stage, m) for stage in range(len(stages.work))]
    seconds, late = max(each.seconds for each in chains), max(each.late for each in chains)
    shown, late = partial_shown(stages, m, late), max(0.0, late)
    return seconds, late, max(seconds, m * rate + stages.updates(m)[0] + late + shown) if shown else seconds


def one_f_one_b_alone(stages: StageTimes, m: int) -> float:
    """Return the time if each stage updates by itself, after every microbatch."""
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
        return None  # ranks wait while an earlier rank takes a group through a slow stage
    return max(busy_at_rank(stages, m, ranks)) + end_of_batch(stages) + stages.longest_step


def relay(stages: StageTimes, m: int) -> float | None:
    """Return the time on one rank with equal stages, two of them resident, and eager updates; see the module."""
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
"""Class of an order -> property of a weight policy -> closed form.

A schedule whose order or policy is missing here is simulated. Code that adds an order may add its forms.
"""


# --- the end of a batch


def end_of_batch(stages: StageTimes) -> float:
    """Return the seconds from the last backward, at the first stage, to the STEP. Later stages have ended before."""
    schedule, reduce, ends, earlier = stages.schedule, stages.by_rank(stages.reduce), [], 0.0
    for stage in range(schedule.num_ranks):
        ends.append(reduce[schedule.rank_of_stage[stage]] - earlier)
        earlier += stages.arrival_backward[stage] + stages.backward[stage]
    return max(0.0, *ends, max(0.0, ends[0], ends[-1]) + stages.reduce_embed) + stages.reduce_norm


class Chain:
    """The reductions of one stage, for which a batch's STEP may have to wait; see the module.

    Attributes:
        late: seconds by which the reductions end after the earliest time of the STEP; negative if they end before.
        seconds: seconds of the batch.
    """

    def __init__(self, stages: StageTimes, stage: int, m: int) -> None:
        p, work, policy = len(stages.work), stages.work[stage], stages.schedule.weights
        held = stages.held(m)[stage]
        alone = m * work + stages.step[stage] + stages.predict[stage] + held + stages.arrival_forward[stage]
        chain = stages.reduce[stage] + stages.reduce_norm + (stages.reduce_embed if stage in (0, p - 1) else 0.0)
        begun = max(-(-(p - 1 - stage) // m), int(policy.predicts))
        since = p - 1 - stage - (begun - 1) * m
        batches = policy.delay + 1 - begun
        window = (batches - 1) * alone + (m - since) * work + held - sum(stages.forward[:stage])
        self.late = chain - window
        self.seconds = max(chain, alone + max(0.0, self.late) / batches)


def partial_shown(stages: StageTimes, m: int, late: float) -> float:
    """Return the seconds for which predictions wait, behind the STEP, for their reductions.

    `late`: the largest `Chain.late`.
    """
    if not any(stages.partial):
        return 0.0
    read = stages.schedule.provisional_microbatches
    shown, earlier = 0.0, 0.0
    for stage, unread in enumerate(stages.schedule.remaining_backwards(m)):
        left = 0 if read is None else m - unread - read  # backwards behind those that the prediction reads
        begin = max(-left * stages.work[stage], min(0.0, late) - earlier)
        if stage == 0 or stages.schedule.reduce_partial:
            shown = max(shown, begin + stages.partial[stage] - stages.step[stage])
        earlier += stages.forward[stage]
    return shown


# --- parts


def _of_relay(stages: StageTimes) -> tuple[list[float], ...]:
    return stages.forward, stages.backward, stages.fetch, stages.store, stages.reduce, stages.update


def _differ(values: list[float]) -> bool:
    return bool(values) and max(values) - min(values) > 1e-12 * max(values)
