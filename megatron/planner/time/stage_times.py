"""Times of a microbatch and of an update by stage and edge, for closed forms, and the parts of microbatches moved."""

from dataclasses import replace
from itertools import pairwise
from operator import add

from megatron.pipeline.program.edges import stages_by_rank
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate.costs import Costs


class StageTimes:
    """Seconds of the instructions of a schedule, by stage and edge.

    Attributes:
        schedule: the schedule.
        forward, backward: seconds of a microbatch at each stage.
        work: seconds of a microbatch's forward, backward and, if the program has one, recompute.
        fetch, store, update: seconds of a stage's copies and its update, if weights live on the host.
        step, reduce: seconds of a stage's update, and of its reduction over replicas (0 without replicas).
        predict, hold: seconds of a stage's prediction, and of keeping its gradients; 0 if weights are not predicted.
        reduce_embed: seconds of the reduction of tied embeddings between first and last stage.
        reduce_norm: seconds of the norm's reduction over all stages.
        partial: seconds of the reductions for which a stage's prediction waits.
        arrival_forward, arrival_backward: seconds of an activation over the edge to a stage, and of a gradient over the
            edge from the next stage; 0 within a rank.
        occupation: the most seconds for which a microbatch keeps an edge busy in one direction.
        moves: the most seconds of a move of a microbatch's saved activations; 0 if none move.
    """

    def __init__(self, costs: Costs, schedule: Schedule) -> None:
        num_stages = schedule.num_stages
        seconds = costs.by_name(num_stages)
        self.schedule = schedule
        self.forward, self.backward = seconds["forward"], seconds["backward"]
        recompute = [each if schedule.recomputes(stage) else 0.0 for stage, each in enumerate(seconds["recompute"])]
        self.work = [sum(each) for each in zip(self.forward, self.backward, recompute, strict=True)]
        self.fetch, self.store, self.update = seconds["fetch"], seconds["store"], seconds["update"]
        self.step = seconds["step"]
        predicts = schedule.weights.predicts
        self.predict = seconds["predict"] if predicts else [0.0] * num_stages
        self.hold = seconds["hold"] if predicts else [0.0] * num_stages
        self.reduce = seconds["reduce_grad"] if schedule.data_parallel else [0.0] * num_stages
        self.reduce_embed = max(seconds["reduce_embed"]) if schedule.ties_ranks else 0.0
        self.reduce_norm = max(seconds["reduce_norm"])
        self.partial = [each if schedule.reduce_partial else 0.0 for each in self.reduce]
        for stage in schedule.tied_stages if schedule.ties_ranks and schedule.provisional_microbatches != 0 else ():
            self.partial[stage] += self.reduce_embed
        if not predicts:
            self.partial = [0.0] * num_stages
        crosses = [one != other for one, other in pairwise(schedule.rank_of_stage)]
        edges = [[each * c for each, c in zip(times, crosses, strict=True)] for times in costs.edges(num_stages - 1)]
        forward, backward, latency = edges
        self.arrival_forward = [0.0, *map(add, forward, latency)]
        self.arrival_backward = [*map(add, backward, latency), 0.0]
        self.occupation = max(forward + backward, default=0.0)
        moves = list(map(max, seconds["evict"], seconds["load"]))
        self.moves = moves if schedule.balance else [0.0] * num_stages

    def by_rank(self, values: list[float]) -> list[float]:
        """Return, by rank, the sums of the values of its stages."""
        return [sum(values[stage] for stage in stages) for stages in stages_by_rank(self.schedule.rank_of_stage)]

    def held(self, num_microbatches: int) -> list[float]:
        """Return, by stage, the seconds to keep gradients, in batches of `num_microbatches`."""
        holds = self.schedule.needs_gradient_copy(num_microbatches)
        return [seconds if is_held else 0.0 for seconds, is_held in zip(self.hold, holds, strict=True)]

    @property
    def longest_step(self) -> float:
        return max(self.by_rank(self.step))

    def longest_update(self, num_microbatches: int) -> float:
        """Return the most seconds that a rank computes once a batch: the sum of `updates` over its stages."""
        return max(self.by_rank(self.updates(num_microbatches)))

    def updates(self, num_microbatches: int) -> list[float]:
        """Return, by stage, the seconds of work once a batch: the step and, with predictions, PREDICT and HOLD."""
        return [sum(each) for each in zip(self.step, self.predict, self.held(num_microbatches), strict=True)]


_MANY = (1 << 20,)  # a batch with enough microbatches to fill any pipeline


def moving_parts(schedule: Schedule) -> list[float]:
    """Return, by rank, the approximate fraction of its microbatches that move to the rank's pair.

    Of n microbatches in flight these are the ones that exceed the bound, and one more to make room for a microbatch
    that comes back.
    """
    if not schedule.balance:
        return [0.0] * schedule.num_ranks
    own, bounds = (each.max_saved_on_rank(_MANY) for each in (replace(schedule, balance=False), schedule))
    evicting = set(schedule.evicting_ranks(_MANY))
    return [
        (count - bound + 1) / count if rank in evicting else 0.0
        for rank, (count, bound) in enumerate(zip(own, bounds, strict=True))
    ]


def hides_moves(stages: StageTimes) -> bool:
    """Return whether no instruction waits for moves of saved activations: no move is longer than a computation."""
    computations = zip(stages.moves, stages.forward, stages.backward, strict=True)
    return all(moves <= min(forward, backward) * (1 + 1e-9) for moves, forward, backward in computations)
