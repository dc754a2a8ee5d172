"""A profiling session: the order of the measured blocks, and the resulting profile. Imports no torch.

A middle stage is timed with two numbers of layers; the difference gives the time of a layer. The first, the last and
the only stage of a pipeline are timed with the smaller number, which gives the times of embedding and head. All blocks
are measured in several rounds, so that drift of the machine (clock, heat, neighbours) affects all of them equally.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.time.profile import (
    AllReduceTime,
    CopyTime,
    HostUpdateTime,
    Profile,
    Spread,
    StagePosition,
    StageTime,
    TransferTime,
    UpdateTime,
)
from megatron.trainer.profile.pool import (
    HostPlan,
    MeasuringError,
    MeasuringTask,
    Pool,
    StagePlan,
    TransferPlan,
    working_counts,
)

TRANSFER_SIZES = tuple(2**exponent for exponent in range(12, 27, 2))  # 4 KiB to 64 MiB
COPY_SIZES = tuple(2**exponent for exponent in range(12, 27, 7))  # 4 KiB, 512 KiB, 64 MiB
_MICROBATCHES = 8  # in a timed batch, which gives one sample
_WARMUP = 10  # minimum number of iterations before the timed ones


@dataclass(frozen=True, kw_only=True)
class ProfilingSession:
    """The measurements that a user has asked for.

    Attributes:
        architecture: "gpt" or "bert".
        argv: flags of the model; see `plan.command.model_argv`.
        sequence_parallel: use sequence parallelism with several tensor ranks.
        processes: number of processes; larger tensor degrees are refused.
        threads: CPU threads of each process.
        tensors, micro_batch_sizes, scopes, weights: the tensor parallel degrees, microbatch sizes, recompute scopes and
            weight policies to measure. Updates do not depend on microbatches and scopes, so all policies except the
            first are measured only with the first microbatch size and scope.
        layers: the two numbers of layers.
        iterations: number of timed microbatches of each block, over all rounds.
    """

    architecture: str
    argv: tuple[str, ...]
    sequence_parallel: bool
    processes: int
    threads: int
    tensors: tuple[int, ...]
    micro_batch_sizes: tuple[int, ...]
    scopes: tuple[RecomputeScope, ...]
    weights: tuple[WeightPolicy, ...]
    layers: tuple[int, int]
    iterations: int
    rounds: int

    def __post_init__(self) -> None:
        if max(self.tensors) > self.processes:
            raise ValueError(
                f"tensor degree {max(self.tensors)} needs as many processes, and there are {self.processes}; raise "
                "--processes, or lower --tensor-sizes"
            )
        if "--mtp-num-layers" in self.argv:
            raise ValueError("layers of multi-token prediction are not measured; leave --mtp-num-layers out")
        few, many = self.layers
        if not 1 <= few < many:
            raise ValueError(f"--layers {few} {many}: the second number has to be larger; give for example 1 3")

    def run(
        self, progress: Callable[[int, int, str], None] = lambda done, total, what: None, *, pool: Pool | None = None
    ) -> Profile:
        """Make all measurements, and return the profile. Raises ValueError if one fails.

        Args:
            progress: `progress(done, total, what)` is called before each block.
            pool: the processes that measure, with the same number and threads; None: start new ones.
        """
        with Pool(self.processes, threads=self.threads) if pool is None else nullcontext(pool) as pool:
            description = pool.do(MeasuringTask(num_ranks=1, num_jobs=1, run=self._example.describe))[0]
            blocks = list(self._blocks(description["shares_processor"]))
            samples: dict[object, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
            num_parameters: dict[object, int] = {}
            deferred_bytes: dict[object, int] = {}
            total = self.rounds * len(blocks)
            for done, (_, (plan, working)) in enumerate(itertools.product(range(self.rounds), blocks)):
                progress(done, total, _describe(plan, working))
                task = MeasuringTask(num_ranks=plan.tensor, num_jobs=working // plan.tensor, run=plan.time)
                for found, count, deferred in _done(pool, task, what=_describe(plan, working)):
                    num_parameters[plan, working] = max(count, num_parameters.get((plan, working), 0))
                    deferred_bytes[plan, working] = max(deferred, deferred_bytes.get((plan, working), 0))
                    for name, values in found.items():
                        samples[plan, working][name] += values
            progress(total, total, "transfers, all-reduces and the host")
            transfers, all_reduces = self._time_transfers(pool)
            copies, host_updates = self._time_host(pool, description)
        return Profile(
            created=datetime.now(timezone.utc),
            architecture=self.architecture,
            flags=self.argv,
            sequence_parallel=self.sequence_parallel,
            processes=self.processes,
            stages=tuple(
                _stage_time(plan, working, found, deferred_bytes[plan, working])
                for (plan, working), found in samples.items()
                if plan.weights is self.weights[0]
            ),
            updates=tuple(
                _update_time(plan, working, num_parameters[plan, working], found)
                for (plan, working), found in samples.items()
                if self._times_updates(plan)
            ),
            transfers=transfers,
            all_reduces=all_reduces,
            copies=copies,
            host_updates=host_updates,
            **description,
        )

    def _blocks(self, shares_processor: bool) -> Iterator[tuple[StagePlan, int]]:
        """Yield the stages to measure, each with the number of processes that work at the same time."""
        few, many = self.layers
        places = [
            (StagePosition.MIDDLE, few),
            (StagePosition.MIDDLE, many),
            *((place, few) for place in StagePosition if place != "middle"),
        ]
        for tensor in self.tensors:
            for working in working_counts(tensor, self.processes, shares_processor=shares_processor):
                for size, scope, weights in itertools.product(self.micro_batch_sizes, self.scopes, self.weights):
                    for place, num_layers in places:
                        plan = self._plan(place, num_layers, tensor, size, scope, weights)
                        if weights is self.weights[0] or self._times_updates(plan):
                            yield plan, working

    def _times_updates(self, plan: StagePlan) -> bool:
        return plan.micro_batch_size == self.micro_batch_sizes[0] and plan.recompute is self.scopes[0]

    @property
    def _example(self) -> StagePlan:
        scope, weights = self.scopes[0], self.weights[0]
        return self._plan(StagePosition.ONLY, self.layers[0], 1, self.micro_batch_sizes[0], scope, weights)

    def _plan(
        self,
        place: StagePosition,
        num_layers: int,
        tensor: int,
        size: int,
        scope: RecomputeScope,
        weights: WeightPolicy,
    ) -> StagePlan:
        num_batches = -(-self.iterations // (_MICROBATCHES * self.rounds))
        return StagePlan(
            architecture=self.architecture, argv=self.argv, place=place, num_layers=num_layers, tensor=tensor,
            micro_batch_size=size, recompute=scope, weights=weights, sequence_parallel=self.sequence_parallel,
            num_microbatches=_MICROBATCHES, num_batches=num_batches,
            num_warmup=-(-max(_WARMUP, self.iterations // 10) // (_MICROBATCHES * self.rounds)) + 1,
        )  # fmt: skip

    def _time_transfers(self, pool: Pool) -> tuple[tuple[TransferTime, ...], tuple[AllReduceTime, ...]]:
        if self.processes == 1:
            return (), ()
        plan = TransferPlan(sizes=TRANSFER_SIZES, num_iterations=self.iterations, num_warmup=_WARMUP)
        found = pool.do(MeasuringTask(num_ranks=2, num_jobs=1, run=plan.time_transfers))[0]
        transfers = tuple(TransferTime(num_bytes=size, seconds=Spread.of(found[size])) for size in TRANSFER_SIZES)
        all_reduces = []
        for ranks in working_counts(1, self.processes, shares_processor=True)[1:]:
            found = pool.do(MeasuringTask(num_ranks=ranks, num_jobs=1, run=plan.time_all_reduces))[0]
            all_reduces += [
                AllReduceTime(ranks=ranks, num_bytes=size, seconds=Spread.of(found[size])) for size in TRANSFER_SIZES
            ]
        return transfers, tuple(all_reduces)

    def _time_host(self, pool: Pool, description: dict) -> tuple[tuple[CopyTime, ...], tuple[HostUpdateTime, ...]]:
        """Measure copies and updates for weights on the host, with one process at work and with several."""
        copies, updates = [], []
        plan = HostPlan(
            sizes=COPY_SIZES, model=description["model"], dtype=description["dtype"],
            num_iterations=max(3, self.iterations // 6), num_warmup=3,
        )  # fmt: skip
        for working in working_counts(1, self.processes, shares_processor=description["shares_processor"]):
            found = _done(
                pool, MeasuringTask(num_ranks=1, num_jobs=working, run=plan.time), what=f"the host, {working} at work"
            )
            for direction, size in found[0][0]:
                seconds = Spread.of([each for copied, _, _ in found for each in copied[direction, size]])
                copies.append(CopyTime(direction=direction, num_bytes=size, working=working, seconds=seconds))
            for kernel in found[0][2]:
                seconds = Spread.of([each for *_, stepped in found for each in stepped[kernel]])
                updates.append(
                    HostUpdateTime(kernel=kernel, num_parameters=found[0][1], working=working, seconds=seconds)
                )
        return tuple(copies), tuple(updates)


def _done(pool: Pool, task: MeasuringTask, *, what: str) -> list[Any]:
    try:
        return pool.do(task)
    except MeasuringError as error:
        raise MeasuringError(f"{what}: {error}") from error


def _describe(plan: StagePlan, working: int) -> str:
    return (
        f"{plan.place.value} stage, {plan.num_layers} layers, t={plan.tensor}, microbatch {plan.micro_batch_size}, "
        f"recompute {plan.recompute.value}, {plan.weights.name}, {working} at work"
    )


def _stage_time(plan: StagePlan, working: int, found: dict[str, list[float]], deferred_bytes: int) -> StageTime:
    halves = {}
    if "backward_input" in found:
        halves = {name: Spread.of(found[name]) for name in ("backward_input", "backward_weight")}
        halves["deferred_bytes"] = deferred_bytes
    return StageTime(
        place=plan.place,
        num_layers=plan.num_layers,
        tensor=plan.tensor,
        micro_batch_size=plan.micro_batch_size,
        recompute=plan.recompute,
        working=working,
        forward=Spread.of(found["forward"]),
        backward=Spread.of(found["backward"]),
        **halves,
    )


def _update_time(plan: StagePlan, working: int, num_parameters: int, found: dict[str, list[float]]) -> UpdateTime:
    return UpdateTime(
        place=plan.place,
        num_layers=plan.num_layers,
        num_parameters=num_parameters,
        tensor=plan.tensor,
        weights=plan.weights.name,
        working=working,
        zero=Spread.of(found["zero"]),
        norm=Spread.of(found["norm"]),
        step=Spread.of(found["step"]),
    )
