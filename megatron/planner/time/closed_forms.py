"""How long a batch takes in closed form: a row for each order that has one.

Notation: w is a microbatch's forward and backward at a stage, c a transfer (bytes / bandwidth + latency) over an edge.

    gpipe          drains      sum of w and 2 c over all stages and edges, for the first microbatch, and (m - 1) rates,
                               each the longest forward and the longest backward
    1f1b           drains      m w of its slowest stage, w and 2 c of those before, and where it waits at first and last
                   overlaps    m rates: nothing fills or drains
                   alone       1 rate: every microbatch is a batch, whose reductions its STEP waits for at once
    interleaved    drains      m times a rank's w over all its stages, and the same

Stage s of 1F1B has a = p - s forwards ahead, of its first backward included. It waits for that one if its trip T, (sum
of w and 2 c from s on), is longer than the a forwards and the backward; and in the mirror image, for its last one. The
rate without a drain is the largest w, or the largest round trip: between stages s and e it is (sum of w + 2 c) over the
number of these stages, for as many microbatches are in flight there. A receive stands one computation ahead, so a rate
is also f + c and b + c at least. All w equal and c = 0 gives the known bubble, (p - 1) / m of the ideal time, and
(p - 1) / (v m) with interleaving (Narayanan et al. 2021, section 2.2). Of interleaved 1F1B the first group of
microbatches passes all stages, each rank p times through one of its stages before it turns to the next: each edge
counts, there and back. A form does not hold, and is None, where a round trip or a receive is slower than the slowest
stage, a move of saved activations slower than a computation, or ranks wait for the slow stages of others.

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
from itertools import accumulate, pairwise
from operator import add

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
        reduce_embed, reduce_norm: of the reductions that the first and the last stage, and all of them, share.
        partial: of what a stage's prediction waits for.
        arrival_forward, arrival_backward: of an activation over the edge to a stage, and of a gradient over that from
            the next one; 0 where there is none.
        occupation: the most time for which a microbatch keeps an edge busy in a direction.
        moves: the most that a move of a microbatch's saved activations takes; 0 where none move.
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
        shares_embedding = schedule.tied_embeddings and schedule.rank_of_stage[0] != schedule.rank_of_stage[-1]
        self.reduce_embed = max(seconds[Kind.REDUCE_EMBED]) if shares_embedding else 0.0
        self.reduce_norm = max(seconds[Kind.REDUCE_NORM])
        self.partial = [each if schedule.reduce_partial else 0.0 for each in self.reduce]
        for stage in (0, num_stages - 1) if shares_embedding else ():
            self.partial[stage] += self.reduce_embed
        if not predicts:
            self.partial = [0.0] * num_stages
        crosses = [one != other for one, other in pairwise(schedule.rank_of_stage)]
        edges = [[each * c for each, c in zip(times, crosses, strict=True)] for times in costs.edges(num_stages - 1)]
        forward, backward, latency = edges
        self.arrival_forward = [0.0, *map(add, forward, latency)]
        self.arrival_backward = [*map(add, backward, latency), 0.0]
        self.occupation = max(forward + backward, default=0.0)
        moves = list(map(max, seconds[Kind.EVICT], seconds[Kind.LOAD]))
        self.moves = moves if schedule.balance else [0.0] * num_stages

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
    forward = max(_flow(stages.forward, stages.arrival_forward, stages.occupation))
    backward = max(_flow(stages.backward, stages.arrival_backward, stages.occupation))
    return sum(_once(stages)) + (m - 1) * (forward + backward) + end_of_batch(stages) + stages.longest_step


def one_f_one_b(stages: StageTimes, m: int) -> float | None:
    p, row, rate = len(stages.work), max(stages.work), round_trips(stages)
    if not _keeps_up(rate, row) or not _hides_moves(stages):
        return None
    # Once the first p microbatches are under way, round trips decide that are a little slower than any stage.
    late = (rate - row) * max(0.0, m - p * p / (p - 1)) if p > 1 else 0.0
    return max(_busy_at(stages, m)) + late + end_of_batch(stages) + stages.longest_step


def one_f_one_b_overlapped(stages: StageTimes, m: int) -> float | None:
    """The time with weights of a delay of one batch and more."""
    rate = max(stages.work)
    if not _keeps_up(round_trips(stages), rate) or not _hides_moves(stages):
        return None
    seconds, late, longest = _overlapped(stages, m, rate)
    most = max(longest, m * rate + stages.longest_update(m) + late)
    if not _keeps_up(most, seconds) and any(
        map(_differ, (stages.forward, stages.backward, stages.arrival_forward[1:]))
    ):
        return None  # stages that differ wait for one another's updates
    return longest


def rate_of(stages: StageTimes) -> float | None:
    """Seconds from one microbatch to the next of 1F1B; None: moves of saved activations decide, and no form knows."""
    return round_trips(stages) if _hides_moves(stages) else None


def _overlapped(stages: StageTimes, m: int, rate: float) -> tuple[float, float, float]:
    """Seconds of a batch, those by which the STEP is late, and seconds with what predictions wait for."""
    chains = [_Chain(stages, stage, m) for stage in range(len(stages.work))]
    seconds, late = max(each.seconds for each in chains), max(each.late for each in chains)
    shown, late = _partial_shown(stages, m, late), max(0.0, late)
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
    if slowest > min(stages.forward + stages.backward) or not _hides_moves(stages):
        return None
    ahead = [2 * (p - 1 - rank) + (v - 1) * p + 1 for rank in range(p)]  # forwards before the first backward
    ranks = [rank for rank in range(p) if ahead[rank] <= m * v]
    by_turn = sum(max(stages.work[first : first + p]) for first in range(0, p * v, p))
    if m > p and not _keeps_up(by_turn, stages.by_rank(stages.work)[-1]):
        return None  # ranks wait while one before the last takes a group through a slow stage
    return max(_busy_at_rank(stages, m, ranks)) + end_of_batch(stages) + stages.longest_step


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


# --- parts


def _of_relay(stages: StageTimes) -> tuple[list[float], ...]:
    return stages.forward, stages.backward, stages.fetch, stages.store, stages.reduce, stages.update


def _differ(values: list[float]) -> bool:
    return bool(values) and max(values) - min(values) > 1e-12 * max(values)


_SLACK = 0.01
"""The part of the time of a microbatch by which something may exceed it that a form leaves out."""


def _flow(seconds: list[float], arrival: list[float], occupation: float) -> list[float]:
    """By stage, from one microbatch to the next of those that only pass in one direction. A receive is posted two
    computations ahead.
    """
    return [max(own, occupation, (own + there) / 2) for own, there in zip(seconds, arrival, strict=True)]


def _once(stages: StageTimes) -> list[float]:
    """What a microbatch takes at each stage and over the edge behind it, there and back."""
    there, back = [*stages.arrival_forward[1:], 0.0], stages.arrival_backward
    return [sum(each) for each in zip(stages.work, there, back, strict=True)]


def round_trips(stages: StageTimes, between: list[float] | None = None) -> float:
    """Seconds from one microbatch to the next of 1F1B, once the pipeline is full: as the slowest stage, edge or
    receive, or round trip between any two stages, in which as many microbatches are in flight as it has stages.

    `between`: of each stage, what stands between a backward and the next forward.
    """
    p, once = len(stages.work), _once(stages)
    between = between or [0.0] * p
    rate = max(
        *map(add, stages.forward, stages.arrival_forward),  # a receive is posted behind the forward before
        *map(add, stages.backward, stages.arrival_backward),
        stages.occupation,
    )
    while True:  # each turn finds the stages that are slowest together, if any are slower
        most, mean, total, first = 0.0, rate, 0.0, 0
        for stage in range(p):
            if total <= between[stage]:
                total, first = between[stage], stage
            own = total + stages.work[stage] - rate
            if own > most:
                most, mean = own, rate + own / (stage - first + 1)
            total += once[stage] - rate
        if most <= 1e-12 * rate * p:
            return rate
        rate = mean


def _keeps_up(rate: float, row: float) -> bool:
    return rate <= row * (1 + _SLACK)


def _hides_moves(stages: StageTimes) -> bool:
    """Whether nothing waits for moves of saved activations: each has the time of one computation."""
    computations = zip(stages.moves, stages.forward, stages.backward, strict=True)
    return all(moves <= min(forward, backward) * (1 + 1e-9) for moves, forward, backward in computations)


def _busy_at(stages: StageTimes, m: int) -> list[float]:
    """By stage, seconds from the beginning of a batch to its last backward if this stage computes all the time that it
    can: all but before its first forward, while its first and last microbatch pass the stages behind it, and behind its
    last backward.
    """
    p, once = len(stages.work), _once(stages)
    before = list(accumulate(once, initial=0.0))
    found = []
    for stage, (forward, backward) in enumerate(zip(stages.forward, stages.backward, strict=True)):
        ahead, trip, work = p - stage, before[p] - before[stage], stages.work[stage]
        if m > ahead:
            own = m * work + max(0.0, trip - ahead * forward - (work - forward))
            own += max(0.0, trip - ahead * (work - forward) - forward)
        else:
            own = max(m * work, trip + (m - 1) * max(forward, backward))
        found.append(before[stage] + own)
    return found


def _busy_at_rank(stages: StageTimes, m: int, ranks: list[int]) -> list[float]:
    """The same by rank, where ranks have several stages: between its first backward and its last forward a rank
    computes all the time. What is before takes the way of the first group of microbatches, and what is behind that of
    the last group, which is the same backwards.
    """
    p, v = stages.schedule.num_ranks, stages.schedule.num_virtual_stages
    arrival = [0.0, *stages.arrival_backward[:-1]]  # over the edge before each stage, too
    ways = [(stages.forward, stages.arrival_forward), (stages.backward, arrival)]
    begins = [_first_group(*each, p) for each in ways]
    works, found = stages.by_rank(stages.work), []
    for rank in ranks:
        last, ahead, own = (v - 1) * p + rank, 2 * (p - 1 - rank) + 1, m * works[rank]
        of_first = max(0, ahead - p)  # of the next group, through the rank's first stage
        for (seconds, _), (others, arrives), begin in zip(ways, ways[::-1], begins, strict=True):
            row = (ahead - of_first) * seconds[last] + of_first * seconds[rank]
            back = sum(others[last + 1 :]) + sum(arrives[last + 1 :])
            own += max(begin[last] + row, begin[-1] + seconds[-1] + back)
            own -= row + p * sum(seconds[rank:last:p])
        found.append(own)
    return found


def _first_group(seconds: list[float], arrival: list[float], p: int) -> list[float]:
    """By stage, when the first microbatch comes to it, where each rank takes p microbatches through one of its stages
    before it turns to the next.
    """
    begins, ends = [0.0], [p * seconds[0]]
    for stage in range(1, len(seconds)):
        begin = begins[-1] + seconds[stage - 1] + arrival[stage]
        begins.append(max(begin, ends[stage - p]) if stage >= p else begin)
        ends.append(max(begins[-1] + p * seconds[stage], ends[-1] + arrival[stage] + seconds[stage]))
    return begins


class _Chain:
    """A batch where the STEP may have to wait for the reductions of a stage; see the module.

    Attributes:
        late: seconds from where the STEP could be to the end of the reductions; negative: they end before.
        seconds: of the batch.
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
    schedule, reduce, ends, earlier = stages.schedule, stages.by_rank(stages.reduce), [], 0.0
    for stage in range(schedule.num_ranks):
        ends.append(reduce[schedule.rank_of_stage[stage]] - earlier)
        earlier += stages.arrival_backward[stage] + stages.backward[stage]
    return max(0.0, *ends, max(0.0, ends[0], ends[-1]) + stages.reduce_embed) + stages.reduce_norm
