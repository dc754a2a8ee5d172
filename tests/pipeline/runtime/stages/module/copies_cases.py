"""What the ranks of the tests of copies of stages run, and the same in one process."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.pipeline.program.copies import Copy, ranks_of_copies
from megatron.pipeline.program.edges import Edge, StageGraph
from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory
from megatron.pipeline.runtime.contract.stage import BatchReport, Microbatch
from megatron.pipeline.runtime.contract.tensors import TensorSpec
from megatron.pipeline.runtime.contract.trace import Tracer, gather_traces, timeline
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.module.graph_stage import GraphModuleStage
from megatron.pipeline.runtime.stages.module.reduction import TiedParameter
from megatron.pipeline.runtime.stages.module.stage import ModuleStage
from megatron.pipeline.runtime.stages.module.update import ModuleUpdate
from megatron.pipeline.runtime.transport.channels import TransferError
from megatron.pipeline.runtime.update.versions import WeightVersions
from megatron.pipeline.runtime.update.weight_prediction import PredictedVersions
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.schedules.program_schedule import ProgramSchedule
from megatron.pipeline.survivors import ReplicaRank, without
from tests.pipeline.runtime import copied_programs, graph_cases
from tests.pipeline.runtime.stages.module import reference

_SPEC = TensorSpec((reference.MICROBATCH_SIZE, reference.WIDTH))


@dataclass(frozen=True)
class Case:
    """A job of `num_replicas` replicas that has lost ranks, by (replica, stage)."""

    num_stages: int = 2
    num_replicas: int = 2
    num_microbatches: int = 2  # of each replica
    lost: tuple[tuple[int, int], ...] = ((1, 1),)
    rank_of_stage: tuple[int, ...] = ()
    weights: str = "flush"
    num_batches: int = 5
    optimizer: str = "sgd"
    clip_grad: float = 0.0
    sums: bool = False
    tied: bool = False
    splits: bool = False
    evaluates: int = 0  # microbatches, after the second batch
    preset: str = ""  # the schedule of each replica, from which `survivors.without` makes that of those left
    virtual_stages: int = 1  # of its ranks
    recompute: bool = False
    most_on_device: int | None = None  # microbatches of a rank; others wait on the host
    num_read: int | None = None  # microbatches of a replica that predictions read; None: nothing is predicted

    @property
    def moves(self) -> bool:
        """Whether saved activations may leave their rank."""
        return self.preset == "bpipe" or self.most_on_device is not None

    @property
    def copies(self) -> tuple[Copy, ...]:
        if self.preset:
            return self.schedule().copies
        return copied_programs.copies_without(
            self.lost,
            num_stages=self.num_stages,
            num_replicas=self.num_replicas,
            num_microbatches=self.num_microbatches,
        )

    @property
    def batch_size(self) -> int:
        return self.num_replicas * self.num_microbatches

    def schedule(self) -> ProgramSchedule:
        return _schedule_of(self)

    def data(self, index: int) -> tuple[Tensor, Tensor]:
        """Of the microbatch of the whole run: replica j takes every d-th one, from j on."""
        number, replica = divmod(index, self.num_replicas)
        return reference.data(number, replica)

    def loss(self, output: Tensor, target: Tensor):
        return (reference.sum_of if self.sums else reference.loss_of)(output, target)

    def make_optimizer(self, parameters) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.01)


@cache
def _schedule_of(case: Case) -> ProgramSchedule:
    if case.preset:
        of_replica = Schedule.preset(
            case.preset, num_stages=case.num_stages, num_virtual_stages=case.virtual_stages,
            recompute=case.recompute, data_parallel=True, most_on_device=case.most_on_device,
            tied_embeddings=case.tied, predict=case.num_read is not None, provisional_microbatches=case.num_read,
            reduce_partial=bool(case.num_read),
        )  # fmt: skip
        lost, most = [ReplicaRank(*each) for each in case.lost], None if case.moves else 12
        left = without(of_replica, case.num_microbatches, num_replicas=case.num_replicas, lost=lost, most_held=most)
        return left.schedule
    return copied_programs.schedule_of(
        case.copies,
        weights=case.weights,
        rank_of_stage=case.rank_of_stage,
        tied_embeddings=case.tied,
        splits=case.splits,
    )


@dataclass
class Outcome:
    reports: list[BatchReport]
    parameters: dict[str, Tensor]
    evaluations: list[dict] = field(default_factory=list)
    left: tuple[int, int, int] = (0, 0, 0)  # results, saved microbatches and sends that nobody has taken
    drawn: list[str] = field(default_factory=list)  # the instructions of the timeline, on rank 0


def parts_of(model: nn.Sequential, num_stages: int) -> list[nn.Sequential]:
    borders = [len(model) * stage // num_stages for stage in range(num_stages + 1)]
    return [model[first:end] for first, end in pairwise(borders)]


def in_one_process(case: Case) -> Outcome:
    """The same global batches. Gradients of the microbatches of each copy are added up first, then those of copies."""
    model = reference.build_model(tied=case.tied)
    stages = parts_of(model, case.num_stages)
    parameters = dict(model.named_parameters())
    stage_of = {name: stage for stage, part in enumerate(stages) for name, _ in part.named_parameters()}
    stage_of = {name: stage_of[name] for name in parameters}
    optimizer = case.make_optimizer(parameters.values())
    delay, versions, reports, evaluations = int(case.weights == "2bw"), [], [], []

    def newest() -> dict[str, Tensor]:
        return {name: each.detach().clone() for name, each in parameters.items()}

    def show(values: dict[str, Tensor]) -> None:
        for name, each in parameters.items():
            each.data = values[name].clone()

    versions.append(newest())
    for batch in range(case.num_batches):
        show(versions[max(batch - delay, 0)])
        sums = [{name: torch.zeros_like(each) for name, each in parameters.items()} for _ in case.copies]
        total, counted = 0.0, 0.0
        for position in range(case.batch_size):
            inputs, target = case.data(batch * case.batch_size + position)
            found = case.loss(model(inputs), target)
            loss, count = found if case.sums else (found, 1.0)
            total, counted = total + loss.item(), counted + float(count)
            gradients = torch.autograd.grad(loss / case.batch_size, list(parameters.values()))
            for name, gradient in zip(parameters, gradients, strict=True):
                for copy, own in zip(case.copies, sums, strict=True):
                    if copy.stage == stage_of[name] and position in copy.positions:
                        own[name] += gradient
        for name, each in parameters.items():
            each.grad = torch.stack([own[name] for own in sums]).sum(0)
            if case.sums:
                each.grad /= counted / case.batch_size
        norm = torch.stack([each.grad.norm(dtype=torch.float64) for each in parameters.values()]).norm().item()
        show(versions[batch])
        if case.clip_grad:
            for each in parameters.values():
                each.grad *= min(1.0, case.clip_grad / (norm + 1e-6))
        optimizer.step()
        versions.append(newest())
        reports.append(BatchReport(batch, losses={"loss": total / counted}, grad_norm=norm))
        if batch == 1 and case.evaluates:
            with torch.no_grad():
                losses = [case.loss(model(case.data(each)[0]), case.data(each)[1]) for each in range(case.evaluates)]
            evaluations.append({"loss": (sum(each.item() for each in losses), float(case.evaluates))})
    return Outcome(reports, versions[-1], evaluations)


class Groups:
    """The groups of this rank in a program with copies. All ranks make all groups, in one order.

    `ranks`: global ranks by their places in the program; None: they are equal.
    """

    def __init__(self, schedule: ProgramSchedule, ranks: Sequence[int] | None = None) -> None:
        self.ranks = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        assert len(self.ranks) == schedule.num_ranks
        self.made = []
        self.job = self._group(range(schedule.num_ranks))
        of_rank = [ranks_of_copies(schedule.copies, schedule.rank_of_stage, rank) for rank in range(schedule.num_ranks)]
        groups = {ranks: self._group(ranks) for ranks in sorted({*of_rank}) if len(ranks) > 1}
        self.tied = self._group(sorted({*schedule.tied_ranks}))
        if dist.get_rank() in self.ranks:
            self.rank = self.ranks.index(dist.get_rank())
            self.copies = groups.get(of_rank[self.rank])
            self.is_first = of_rank[self.rank][0] == self.rank

    def _group(self, ranks):
        self.made.append(dist.new_group([self.ranks[each] for each in ranks]))
        return self.made[-1]

    def close(self) -> None:
        for group in self.made:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


def _tied(case: Case, groups: Groups, names) -> TiedParameter | None:
    own = tuple(name for name in (reference.FIRST_WEIGHT, reference.LAST_WEIGHT) if name in names)
    if not (case.tied and own):
        return None
    counts = groups.is_first and reference.FIRST_WEIGHT in own
    return TiedParameter(own, groups.tied, counts_in_norm=counts, adds=groups.is_first)


def train(case: Case) -> Outcome:
    """Train this rank's stages of a chain."""
    groups = Groups(case.schedule())
    stages, update, memory = _own(case, groups)
    return _run(case, case.schedule(), stages, update, groups, reference.MICROBATCH_SIZE, activation_memory=memory)


def error_of_a_wait(case: Case) -> str:
    """What the last rank says that waits for others, which do nothing."""
    schedule = case.schedule()
    groups = Groups(schedule)
    stages, update, _ = _own(case, groups)
    engine = PipelineEngine(schedule, stages, update, timeout=timedelta(seconds=0.5))
    said = ""
    if groups.rank == schedule.num_ranks - 1:
        try:
            engine.run_batch(case.batch_size, case.batch_size * reference.MICROBATCH_SIZE)
        except TransferError as error:
            said = str(error)
    dist.barrier()
    return said


def _own(case: Case, groups: Groups) -> tuple[list[ModuleStage], ModuleUpdate, ActivationMemory | None]:
    """This rank's stages of a chain, their update, and the memory from which activations move."""
    parts = parts_of(reference.build_model(tied=case.tied), case.num_stages)
    if case.tied:
        parts[-1] = deepcopy(parts[-1])
    own = [case.copies[number].stage for number in case.schedule().stages_of(groups.rank)]
    return _stages_and_update(
        case, [parts[stage] for stage in own], own, lambda microbatch: case.data(microbatch.index),
        copies_group=groups.copies, counts_in_norm=groups.is_first, job_group=groups.job,
        tied=lambda names: _tied(case, groups, names),
    )  # fmt: skip


def _stages_and_update(case, parts, own, data, *, tied=lambda names: None, **groups):
    """`data`: microbatch -> its input and target."""
    parameters = {name: each for part in parts for name, each in part.named_parameters()}
    versions, predicting = WeightVersions(parameters, window=1 if case.weights == "flush" else 2), {}
    if case.num_read is not None:
        versions = PredictedVersions(parameters)
        predicting = {"reduce_partial": True, "provisional_microbatches": case.num_read * case.num_replicas}
    last, memory = case.num_stages - 1, ActivationMemory() if case.moves else None
    stages = [
        ModuleStage(
            part, index=stage, num_stages=case.num_stages, versions=versions,
            source=None if stage else lambda microbatch: data(microbatch)[0],
            loss=(lambda output, microbatch: case.loss(output, data(microbatch)[1])) if stage == last else None,
            input_spec=_SPEC if stage else None, output_spec=None if stage == last else _SPEC,
            recompute=case.recompute, activation_memory=memory,
        )
        for part, stage in zip(parts, own, strict=True)
    ]  # fmt: skip
    update = ModuleUpdate(
        parameters, versions=versions, optimizer=case.make_optimizer(parameters.values()), clip_grad=case.clip_grad,
        num_grad_buffers=1 if case.weights == "flush" else 2, tied=tied(parameters), **predicting, **groups,
    )  # fmt: skip
    return stages, update, memory


def go_on(case: Case, border: int) -> Outcome | None:
    """Train `border` batches on all ranks, replica by replica, and the others without the lost ones, whose outcome is
    None; weights, moments and gradient buffers stay as they are.
    """
    p, d = case.num_stages, case.num_replicas
    replica, stage = divmod(dist.get_rank(), p)
    schedule = case.schedule()
    left = [each * p + place for place in range(p) for each in range(d) if (each, place) not in case.lost]
    groups = Groups(schedule, left)
    replicas = [dist.new_group([each * p + place for each in range(d)]) for place in range(p)][stage]
    own = [replica]  # and nobody, once batches are those of all replicas
    [module], update, _ = _stages_and_update(
        case, [parts_of(reference.build_model(), p)[stage]], [stage],
        lambda microbatch: case.data(microbatch.index * d + own[0] if own else microbatch.index),
        data_parallel_group=replicas, counts_in_norm=replica == 0, job_group=dist.new_group(),
    )  # fmt: skip
    whole = Schedule.preset(case.weights, num_stages=p, data_parallel=True)
    engine = PipelineEngine(whole, module, update, ranks=range(replica * p, (replica + 1) * p))
    reports = []
    for _ in range(border):
        reports += engine.run_batch(case.num_microbatches, case.batch_size * reference.MICROBATCH_SIZE)
    reports += engine.drain()
    engine.close()
    if dist.get_rank() not in left:
        return None
    update.regroup(
        data_parallel_group=None, copies_group=groups.copies, counts_in_norm=groups.is_first, job_group=groups.job
    )
    own.clear()
    return _run(case, schedule, [module], update, groups, reference.MICROBATCH_SIZE, reports, tracer=None)


def _run(case, schedule, stages, update, groups, samples, reports=(), **options) -> Outcome:
    """Train the batches behind those of `reports`."""
    border = len(reports)
    engine = PipelineEngine(
        schedule, stages, update, ranks=groups.ranks, timeout=timedelta(seconds=20), first_batch=border,
        first_microbatch=border * case.batch_size, **{"tracer": Tracer(num_batches=64)} | options,
    )  # fmt: skip
    reports, evaluations = list(reports), []
    for batch in range(border, case.num_batches):
        reports += engine.run_batch(case.batch_size, case.batch_size * samples)
        if batch == 1 and case.evaluates:
            reports += engine.drain()
            evaluations.append(engine.evaluate(case.evaluates))
    reports += engine.drain()
    traces = None if engine.tracer is None else gather_traces(engine.trace())
    rows = timeline(traces).rows if traces else ()
    assert engine.saved.peak_on_rank <= max(schedule.max_saved_on_rank(()))
    dist.barrier(group=groups.job)
    left = len(engine._executor._exchange), sum(len(each.activations) for each in stages), engine.num_unread_sends()
    engine.close()
    groups.close()
    weights = {name: each.clone() for name, each in update.versions.newest_tensors().items()}
    return Outcome(reports, weights, evaluations, left, [str(each) for row in rows for each in row])


GRAPH = (Edge(0, 1), Edge(0, 2), Edge(0, 3, gradient=False), Edge(1, 2), Edge(2, 3))


def graph_shape(*, shares: bool = False) -> graph_cases.Shape:
    """Four stages with edges past a stage, one of which carries ids alone."""
    return graph_cases.Shape(GRAPH, (0, 1, 2, 3), shares)


def train_graph(case: Case, *, shares: bool = False) -> Outcome:
    """Train this rank's stage of `graph_shape`, as `graph_cases.in_one_process` does."""
    shape = graph_shape(shares=shares)
    schedule = copied_programs.schedule_of(case.copies, edges=shape.edges)
    groups = Groups(schedule)
    [number] = schedule.stages_of(groups.rank)
    stage = case.copies[number].stage
    node = graph_cases.Node(shape, stage)
    parameters = {f"{stage}.{name}": each for name, each in node.named_parameters()}
    versions = WeightVersions(parameters, window=1)
    module = GraphModuleStage(
        node, index=stage, graph=StageGraph.of(4, shape.edges), versions=versions, has_loss=node.is_last,
        data=partial(_data_of_graph, case),
        edges={
            edge.target if edge.source == stage else edge.source: shape.tensors_of(edge)
            for edge in shape.edges
            if stage in (edge.source, edge.target)
        },
    )  # fmt: skip
    update = ModuleUpdate(
        parameters, versions=versions, optimizer=graph_cases.optimizer_of(parameters.values()),
        clip_grad=case.clip_grad, num_grad_buffers=1, copies_group=groups.copies, counts_in_norm=groups.is_first,
        job_group=groups.job,
    )  # fmt: skip
    return _run(case, schedule, [module], update, groups, graph_cases.SAMPLES)


def _data_of_graph(case: Case, microbatch: Microbatch):
    return graph_cases.data_of(microbatch)


def refusal(case: Case) -> str:
    """What the engine says of the graph that shares a parameter."""
    try:
        train_graph(case, shares=True)
    except ValueError as error:
        return str(error)
    return "nothing"
