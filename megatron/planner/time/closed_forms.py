"""How long a batch takes in closed form: a row for each order that has one.

Notation: w is a microbatch's forward and backward at a stage, c a transfer (bytes / bandwidth + latency) over an edge.

    gpipe          drains      sum of w and 2 c over all stages and edges, for the first microbatch, and (m - 1) rates,
                               each the longest forward and the longest backward
    1f1b           drains      the same; its rate is the largest w, or the largest round trip
                   overlaps    m rates: nothing fills or drains
                   alone       1 rate: every microbatch is a batch, whose reductions its STEP waits for at once
    interleaved    drains      m times a rank's w over all its stages, the first stage's w of each other rank, and 2 c

The round trip of 1F1B: stage s has p - s microbatches in flight, so one of them ends every (sum of w + 2 c from s on) /
(p - s). All w equal and c = 0 gives the known bubble, (p - 1) / m of the ideal time, and (p - 1) / (v m) with
interleaving (Narayanan et al. 2021, section 2.2).

After the last backward come the reductions and the optimizer's step; a stage that ends early reduces early. Policies
that overlap updates (2bw: delay k = 1) hide them behind the batches that follow. Batch j's last backward at stage s
comes p - 1 - s microbatches after its last forward there: in batch j + q, r microbatches after that batch began, where
(p - 1 - s) = (q - 1) m + r and 1 <= r <= m. The first stage needs the STEP when batch j + k + 1 begins, n = k + 1 - q
batches after batch j + q. So of the chain of stage s only what exceeds n (m w + step) - step - r w - s f shows, once in
n batches; and one chain runs at a time, so a batch takes as long as one at least. Of 2bw the window is
(m - p + 1) w + s b; its last stage ends its batches before the wait (q = 0), which so makes room for its reductions as
well, and what exceeds there shows in every other batch.

Weights that predict add PREDICT to a stage's batch, and HOLD where it stands. The last stage's chain begins behind its
PREDICT, so q = 1 and r = 0 there: n = 1 at all stages, and HOLD lies in the window, too. What replicas or both ends
reduce for a prediction begins where the backwards that it reads are done and the chain before has ended, and runs
beside what is computed until then and the STEP; the rest shows.

A relay on one rank with N stages that are alike, weights on the host and eager updates, of X, G, R and U for a stage's
fetch, store, reduction and update (docs/schedules.md, l2l; without the update this is what L2L's equation 4 counts):

    X + (N - 1) max(m f, X) + m w + (N - 1) max(m r, G, R, U) + R + G + U

r is a recompute and a backward, f a forward, w a forward and a backward. It holds where fetches beside backwards are
hidden, X <= m w and m r, and two gradient buffers are enough, (m r + R + G)/2 <= max(m r, G, R, U). All else is
simulated.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.program.lane_order import EAGER, Residency
from megatron.pipeline.program.stages import stages_by_rank
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.schedules.gpipe import GPipe
from megatron.pipeline.schedules.interleaved import Interleaved
from megatron.pipeline.schedules.one_f_one_b import OneForwardOneBackward
from megatron.pipeline.schedules.order import Order
from megatron.pipeline.schedules.relay import Relay
from megatron.pipeline.simulate.costs import Costs

_MANY = (1 << 20,)  # microbatches, which fill any pipeline


class StageTimes:
    """What a microbatch and an update take, by stage and edge.

    Attributes:
        schedule: whose computations they are.
        forward, backward, work: of a microbatch; `work` is both, and what the program recomputes.
        fetch, store, update: of a stage's copies and its update, where weights live on the host.
        step, reduce: of a stage's update, and of its reduction over replicas; 0 where there are none.
        predict, hold: of a stage's prediction, and of keeping its gradients; 0 where the weights do not predict.
        reduce_rest: of the reductions of all stages together.
        partial: of what a stage's prediction waits for.
        round_trip: of a microbatch over an edge, there and back.
        occupation: the time for which it keeps an edge busy in a direction.
        moves: of a microbatch's saved activations, on average over microbatches.
    """

    def __init__(self, costs: Costs, schedule: Schedule) -> None:
        num_stages = schedule.num_stages
        seconds = costs.seconds(num_stages)
        self.schedule = schedule
        self.forward, self.backward = seconds[Kind.FORWARD], seconds[Kind.BACKWARD]
        recompute = [each if schedule.recomputes(stage) else 0.0 for stage, each in enumerate(seconds[Kind.RECOMPUTE])]
        self.work = [sum(each) for each in zip(self.forward, self.backward, recompute, strict=True)]
        self.fetch, self.store = seconds[Kind.FETCH], seconds[Kind.STORE_GRAD]
        self.update = seconds[Kind.UPDATE]
        self.step = seconds[Kind.STEP]
        predicts = schedule.weights.predicts
        self.predict = seconds[Kind.PREDICT] if predicts else [0.0] * num_stages
        self.hold = seconds[Kind.HOLD] if predicts else [0.0] * num_stages
        self.reduce = seconds[Kind.REDUCE_GRAD] if schedule.data_parallel else [0.0] * num_stages
        shares_embedding = schedule.rank_of_stage[0] != schedule.rank_of_stage[-1]
        self.reduce_rest = costs.reduce_embed * shares_embedding + max(seconds[Kind.REDUCE_NORM])
        self.partial = [each if schedule.reduce_partial else 0.0 for each in self.reduce]
        for stage in (0, num_stages - 1) if shares_embedding else ():
            self.partial[stage] += costs.reduce_embed
        if not predicts:
            self.partial = [0.0] * num_stages
        forward, backward, latency = costs.edges(num_stages - 1)
        self.round_trip = [f + b + 2 * each for f, b, each in zip(forward, backward, latency, strict=True)]
        self.occupation = [max(f, b) for f, b in zip(forward, backward, strict=True)]
        moved = moving_parts(schedule) if max(seconds[Kind.EVICT]) else ()
        self.moves = [
            part * (evict + load)
            for part, evict, load in zip(moved, seconds[Kind.EVICT], seconds[Kind.LOAD], strict=False)
        ]

    def by_rank(self, values: list[float]) -> list[float]:
        """Sums over the stages of each rank."""
        return [sum(values[stage] for stage in stages) for stages in stages_by_rank(self.schedule.rank_of_stage)]

    def held(self, num_microbatches: int) -> list[float]:
        """The time to keep gradients, with batches of so many microbatches."""
        holds = self.schedule.holds(num_microbatches)
        return [seconds if is_held else 0.0 for seconds, is_held in zip(self.hold, holds, strict=True)]

    @property
    def longest_step(self) -> float:
        return max(self.by_rank(self.step))

    def longest_update(self, num_microbatches: int) -> float:
        """What a rank computes once a batch: the step, and where the weights predict what this takes."""
        return max(self.by_rank(self.updates(num_microbatches)))

    def updates(self, num_microbatches: int) -> list[float]:
        """The same by stage."""
        return [sum(each) for each in zip(self.step, self.predict, self.held(num_microbatches), strict=True)]


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


def moving_parts(schedule: Schedule) -> list[float]:
    """About which part of its microbatches each rank moves to its pair: of n in flight as many as exceed the bound, and
    one more to make room for those that come back."""
    if not schedule.balance:
        return [0.0] * schedule.num_ranks
    own, bounds = (each.max_saved_on_rank(_MANY) for each in (replace(schedule, balance=False), schedule))
    evicting = set(schedule.evicting_ranks(_MANY))
    return [
        (count - bound + 1) / count if rank in evicting else 0.0
        for rank, (count, bound) in enumerate(zip(own, bounds, strict=True))
    ]


# --- the forms


def gpipe(stages: StageTimes, m: int) -> float:
    rate = max([*stages.forward, *stages.occupation]) + max([*stages.backward, *stages.occupation])
    return _filled_and_drained(stages, m, rate)


def one_f_one_b(stages: StageTimes, m: int) -> float:
    return _filled_and_drained(stages, m, _rate(stages, m))


def one_f_one_b_overlapped(stages: StageTimes, m: int) -> float:
    """The time with weights of a delay of one batch and more."""
    p = len(stages.work)
    chains, rate = [_Chain(stages, stage, m) for stage in range(p)], _rate(stages, m + p)
    seconds = max(m * rate + stages.longest_update(m), *(each.seconds for each in chains))
    late = max(each.late for each in chains)
    shown = _partial_shown(stages, m, late)
    return max(seconds, m * rate + stages.updates(m)[0] + max(0.0, late) + shown) if shown else seconds


def one_f_one_b_alone(stages: StageTimes, m: int) -> float:
    """The time with stages that update alone, after every microbatch."""
    updates = [sum(each) for each in zip(stages.work, stages.reduce, stages.step, strict=True)]
    return max(_rate(stages, len(stages.work) + 1) + stages.longest_step, *updates)


def interleaved(stages: StageTimes, m: int) -> float:
    p = stages.schedule.num_ranks
    if stages.schedule.num_virtual_stages == 1:
        return one_f_one_b(stages, m)
    by_rank = stages.by_rank(stages.work)
    busiest = max(range(p), key=by_rank.__getitem__)
    fill = sum(stages.work[:p]) - stages.work[busiest] + sum(stages.round_trip[: p - 1])
    return m * by_rank[busiest] + fill + end_of_batch(stages) + stages.longest_step


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
    return once + (n - 1) * bottleneck + reduce + store + max(update, stages.reduce_rest)


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


# --- parts


def _of_relay(stages: StageTimes) -> tuple[list[float], ...]:
    return stages.forward, stages.backward, stages.fetch, stages.store, stages.reduce, stages.update


def _differ(values: list[float]) -> bool:
    return max(values) - min(values) > 1e-12 * max(values)


def _filled_and_drained(stages: StageTimes, m: int, rate: float) -> float:
    once = sum(stages.work) + sum(stages.round_trip)
    return once + (m - 1) * rate + end_of_batch(stages) + stages.longest_step


def _rate(stages: StageTimes, num_microbatches: int) -> float:
    """Seconds from one microbatch to the next of 1F1B, once the pipeline is full."""
    rate, trip, p = max(stages.work), 0.0, len(stages.work)
    for stage in range(p - 1, -1, -1):
        trip += stages.work[stage] + (stages.round_trip[stage] if stage < p - 1 else 0.0)
        if p - stage < num_microbatches:
            rate = max(rate, trip / (p - stage))
    return max([rate, *stages.moves, *stages.occupation])


class _Chain:
    """A batch where the STEP may have to wait for the reductions of a stage; see the module.

    Attributes:
        late: seconds from where the STEP could be to the end of the reductions; negative: they end before.
        seconds: of the batch.
    """

    def __init__(self, stages: StageTimes, stage: int, m: int) -> None:
        p, work, policy = len(stages.work), stages.work[stage], stages.schedule.weights
        held = stages.held(m)[stage]
        alone = m * work + stages.step[stage] + stages.predict[stage] + held
        chain = stages.reduce[stage] + stages.reduce_rest
        begun = max(-(-(p - 1 - stage) // m), int(policy.predicts))
        since = p - 1 - stage - (begun - 1) * m
        batches = policy.delay + 1 - begun
        window = (batches - 1) * alone + (m - since) * work + held - sum(stages.forward[:stage])
        self.late = chain - window
        self.seconds = max(chain, alone + max(0.0, self.late) / batches)


def _partial_shown(stages: StageTimes, m: int, late: float) -> float:
    """Seconds for which predictions wait for their reductions behind the STEP. `late`: the most of any chain."""
    if not any(stages.partial):
        return 0.0
    read = stages.schedule.provisional_microbatches
    shown, earlier = 0.0, 0.0
    for stage, unread in enumerate(stages.schedule.unread(m)):
        left = 0 if read is None else m - unread - read  # backwards behind those that are read
        begin = max(-left * stages.work[stage], min(0.0, late) - earlier)
        if stage == 0 or stages.schedule.reduce_partial:
            shown = max(shown, begin + stages.partial[stage] - stages.step[stage])
        earlier += stages.forward[stage]
    return shown


def end_of_batch(stages: StageTimes) -> float:
    """Seconds from the last backward, which is the first stage's, to the STEP. Later stages have ended before."""
    reduce, ends, earlier = stages.by_rank(stages.reduce), [], 0.0
    for stage in range(stages.schedule.num_ranks):
        ends.append(reduce[stages.schedule.rank_of_stage[stage]] - earlier)
        earlier += stages.backward[stage]
    return max(0.0, *ends) + stages.reduce_rest
