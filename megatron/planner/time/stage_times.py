"""Times of a microbatch and of an update at each stage and over each edge, as closed forms need them, and counts of
moves.
"""

from dataclasses import replace
from itertools import pairwise
from operator import add

from megatron.pipeline.program.edges import stages_by_rank
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate.costs import Costs


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
        holds = self.schedule.needs_gradient_copy(num_microbatches)
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


_MANY = (1 << 20,)  # microbatches, which fill any pipeline


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


def hides_moves(stages: StageTimes) -> bool:
    """Whether nothing waits for moves of saved activations: each has the time of one computation."""
    computations = zip(stages.moves, stages.forward, stages.backward, strict=True)
    return all(moves <= min(forward, backward) * (1 + 1e-9) for moves, forward, backward in computations)
