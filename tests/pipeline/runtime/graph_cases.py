"""What the ranks of the tests of graphs run: stages with several inputs and outputs, and the same in one process."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from megatron.pipeline.program.edges import Edge, StageGraph
from megatron.pipeline.program.instruction import Tensor as Travelling
from megatron.pipeline.runtime.contract.stage import BatchReport, Microbatch
from megatron.pipeline.runtime.contract.tensors import EdgeTensors, TensorSpec
from megatron.pipeline.runtime.contract.trace import RankTrace, Tracer, gather_traces
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.module.graph_stage import GraphModuleStage
from megatron.pipeline.runtime.stages.module.rank_update import StageUpdates
from megatron.pipeline.runtime.stages.module.update import ModuleUpdate
from megatron.pipeline.runtime.update.optimizer_wrappers import GapAware
from megatron.pipeline.runtime.update.versions import AheadVersions, WeightVersions
from megatron.pipeline.runtime.update.weight_prediction import WeightPredictor
from megatron.pipeline.schedules import Schedule

WIDTH, SAMPLES = 8, 3
_IDS = TensorSpec((SAMPLES, 1), torch.int64)
_HIDDEN = TensorSpec((SAMPLES, WIDTH), torch.float32)
_WEIGHT = TensorSpec((WIDTH, WIDTH), torch.float32)


@dataclass(frozen=True)
class Shape:
    """A pipeline: its edges, and the rank of each stage. The last stage has the loss. `shares`: the first stage's
    weight goes to all that it reaches over edges with gradients, from each to the next, and each of them uses it.
    """

    edges: tuple[Edge, ...]
    rank_of_stage: tuple[int, ...]
    shares: bool = False

    @property
    def graph(self) -> StageGraph:
        return StageGraph.of(len(self.rank_of_stage), self.edges)

    @property
    def holders(self) -> frozenset[int]:
        """The stages that have the shared weight, first of all its owner."""
        holders = {0} if self.shares else set()
        for edge in sorted(self.graph.edges):
            if edge.gradient and edge.source in holders:
                holders.add(edge.target)
        return frozenset(holders)

    def tensors_of(self, edge: Edge) -> EdgeTensors:
        """Ids alone or with a tensor that gets no gradient, one tensor, or two and the ids; then the shared weight."""
        if not edge.gradient:
            return EdgeTensors([_IDS] if edge.target % 2 else [_IDS, _HIDDEN])
        specs = [_HIDDEN] if edge.target % 2 else [_HIDDEN, _IDS, _HIDDEN]
        if edge.source not in self.holders:
            return EdgeTensors(specs)
        return EdgeTensors([*specs, _WEIGHT], [*[None] * len(specs), 0])


@dataclass
class Outcome:
    reports: list[BatchReport]
    parameters: dict[str, torch.Tensor]
    evaluations: list[dict] = field(default_factory=list)
    peak_saved: dict[int, int] = field(default_factory=dict)
    left: tuple[int, int] = (0, 0)
    traces: list[RankTrace] | None = None
    num_ahead: dict[int, int] = field(default_factory=dict)
    bytes_sent: int = 0


def random_shape(seed: int, *, num_stages: int, num_ranks: int) -> Shape:
    """Each stage but the last hands on to one or several later ones; some edges carry ids alone."""
    choose = random.Random(seed)
    edges = []
    for stage in range(num_stages - 1):
        later = range(stage + 1, num_stages)
        targets = choose.sample(later, choose.randint(1, min(3, len(later))))
        edges += [
            Edge(stage, target, gradient=number == 0 or choose.random() < 0.7) for number, target in enumerate(targets)
        ]
    places = [*range(num_ranks), *(choose.randrange(num_ranks) for _ in range(num_stages - num_ranks))]
    choose.shuffle(places)
    return Shape(tuple(sorted(edges)), tuple(places))


class Node(nn.Module):
    """A stage: adds up what it gets, and hands on what it made of that."""

    def __init__(self, shape: Shape, stage: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.stage, self.is_last = stage, stage == shape.graph.num_stages - 1
        edges = shape.graph.edges
        self.edges = {edge.target: shape.tensors_of(edge) for edge in edges if edge.source == stage}
        self.sources = {edge.source: shape.tensors_of(edge) for edge in edges if edge.target == stage}

    def forward(self, data, inputs):
        """`data`: (the microbatch's number, its input, its target)."""
        number, input, target = data
        total = input * (1.0 + self.stage / 8)
        shared = self.linear.weight
        for source in sorted(inputs, reverse=True):
            for place, tensor in enumerate(inputs[source]):
                if self.sources[source].activations.owners[place] is not None:
                    total, shared = total + nn.functional.linear(input, tensor), tensor
                    continue
                total = total + tensor * (1.0 + place / 4 if tensor.is_floating_point() else 0.125)
        hidden = torch.tanh(self.linear(total))
        if self.training:  # dropout, whose mask is the same on each device
            generator = torch.Generator().manual_seed(1000 * number + self.stage)
            hidden = hidden * (torch.rand(hidden.shape, generator=generator) >= 0.1).to(hidden.device) / 0.9
        ids = (hidden.detach()[:, :1] * 0).long() + (number + self.stage) % 5  # where the hidden states are
        outputs = {}
        for taker, tensors in self.edges.items():
            travelling = tensors.activations
            outputs[taker] = {
                (_HIDDEN,): (hidden,),
                (_HIDDEN, _IDS, _HIDDEN): (hidden, ids, hidden * 0.5),
                (_IDS,): (ids,),
                (_IDS, _HIDDEN): (ids, hidden),
            }[tuple(spec for spec in travelling.specs if spec is not _WEIGHT)]
            outputs[taker] += (shared,) if travelling.has_shared else ()
        return outputs, (hidden - target).square().mean() if self.is_last else None


def data_of(microbatch: Microbatch | int, device: str = "cpu"):
    number = microbatch if isinstance(microbatch, int) else microbatch.index
    generator = torch.Generator().manual_seed(number)
    return number, *(torch.randn(SAMPLES, WIDTH, generator=generator).to(device) for _ in range(2))


def optimizer_of(parameters, *, lr: float = 0.1, kind: str = "sgd") -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=lr / 10, weight_decay=0.1)
    if kind == "adafactor":
        return torch.optim.Adafactor(parameters, lr=lr / 10)
    if kind == "plain":
        return torch.optim.SGD(parameters, lr=lr)
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def scheduler_of(optimizer: torch.optim.Optimizer, *, kind: str) -> torch.optim.lr_scheduler.LRScheduler | None:
    """Learning rates that change with every step, for AdamW."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)) if kind == "adamw" else None


def in_one_process(shape: Shape, batches: Sequence[int], *, clip_grad: float = 0.0) -> Outcome:
    """The same training without stages."""
    graph = shape.graph
    nodes = [Node(shape, stage) for stage in range(graph.num_stages)]
    parameters = {f"{stage}.{name}": each for stage, node in enumerate(nodes) for name, each in node.named_parameters()}
    optimizer, reports, number = optimizer_of(parameters.values()), [], 0
    for batch, size in enumerate(batches):
        optimizer.zero_grad()
        losses = []
        for _ in range(size):
            made: dict[tuple[int, int], tuple] = {}
            for node in nodes:
                sources = graph.makers(Travelling.ACTIVATION, node.stage)
                inputs = {source: _cut(made[source, node.stage], graph, source, node.stage) for source in sources}
                outputs, loss = node(data_of(number), inputs)
                made |= {(node.stage, target): tensors for target, tensors in outputs.items()}
            losses.append(loss.item())
            (loss / size).backward()
            number += 1
        norm = torch.stack([each.grad.norm(dtype=torch.float64) for each in parameters.values()]).norm().item()
        if clip_grad:
            factor = min(1.0, clip_grad / (norm + 1e-6))
            for each in parameters.values():
                each.grad.mul_(factor)
        optimizer.step()
        reports.append(BatchReport(batch, losses={"loss": sum(losses) / size}, grad_norm=norm))
    return Outcome(reports, {name: each.detach() for name, each in parameters.items()})


def replayed(
    shape: Shape,
    batches: Sequence[int],
    *,
    recompute: bool,
    lr: float = 0.1,
    kind: str = "sgd",
    predict: bool = False,
    provisional: bool = False,
    gap_aware: bool = False,
    drains: Sequence[int] = (),
) -> Outcome:
    """FTPipe's numbers in one process: each stage in turn by its depth, at the one version that it has. In which order
    stages take turns is random, for it does not matter. `predict`: each forward has a prediction of its own;
    `provisional`: a step of its own, with the gradients that are there. `gap_aware`: gradients are divided by the gap.
    """
    graph, choose = shape.graph, random.Random(0)
    nodes = [Node(shape, stage) for stage in range(graph.num_stages)]
    named = [dict(node.named_parameters()) for node in nodes]
    stepped = [{name: each.detach().clone().requires_grad_() for name, each in own.items()} for own in named]
    optimizers = [optimizer_of(own.values(), lr=lr, kind=kind) for own in stepped]
    rule = _Rule(stepped, optimizers, [scheduler_of(each, kind=kind) for each in optimizers], predict, gap_aware)
    rule.make_optimizer = partial(optimizer_of, lr=lr, kind=kind) if provisional else None
    losses = [[] for _ in batches]
    norms = [[0.0] * len(nodes) for _ in batches]
    first, number = 0, 0
    for last, size in enumerate(batches):
        number += size
        if last + 1 == len(batches) or last in drains:
            sizes = batches[first : last + 1]
            stretch = range(number - sum(sizes), number)
            of = [batch for batch, count in enumerate(sizes, start=first) for _ in range(count)]
            _replay(graph, nodes, named, rule, stretch, of, batches, recompute, losses, norms, choose)
            first = last + 1
    reports = [
        BatchReport(batch, losses={"loss": sum(found) / len(found)}, grad_norm=sum(norms[batch]) ** 0.5)
        for batch, found in enumerate(losses)
    ]
    parameters = {f"{stage}.{name}": each.detach() for stage, own in enumerate(named) for name, each in own.items()}
    return Outcome(reports, parameters)


class _Rule:
    """The weights of the stages that a replay steps, and where forwards are computed. `versions`: steps so far."""

    def __init__(self, stepped, optimizers, schedulers, predict, gap_aware) -> None:
        self.stepped, self.optimizers, self.schedulers, self.predict = stepped, optimizers, schedulers, predict
        self.gap_aware = gap_aware
        self.make_optimizer = None  # where forwards are stepped provisionally
        self.versions = [0] * len(stepped)
        self.unstepped = [(0, 1)] * len(stepped)  # (microbatches whose gradients no step has taken, of how many)
        self.forwards, self.sizes = {}, {}  # by stage, name and batch: the weights of the first forward; mean steps

    def step(self, stage, named) -> None:
        before = {name: each.detach().clone() for name, each in self.stepped[stage].items()}
        for name, each in self.stepped[stage].items() if self.gap_aware else ():
            forward, size = self.forwards.pop((stage, name, self.versions[stage])), self.sizes.get((stage, name))
            if size is not None:
                steps = torch.where(size > 0, (forward - each.detach()).abs() / size, 0.0)
                each.grad = each.grad / (1 + steps)
        self.optimizers[stage].step()
        for name, each in self.stepped[stage].items():
            step = (before[name] - each.detach()).abs()
            self.sizes[stage, name] = torch.lerp(self.sizes.get((stage, name), step), step, 1 - 0.99)
        if self.schedulers[stage] is not None:
            self.schedulers[stage].step()
        self.versions[stage] += 1
        self.unstepped[stage] = (0, 1)
        self.show(stage, named)

    def show(self, stage, named) -> None:
        """The weights, behind the back of graphs that have saved them."""
        for name, each in named.items():
            each.data.copy_(self.stepped[stage][name].detach())

    @contextmanager
    def forward(self, stage, batch, named):
        """A block in which the weights of a forward of `batch` are there."""
        horizon, mine = batch - self.versions[stage], self.stepped[stage]
        if self.predict and horizon:
            predictor = WeightPredictor(self.optimizers[stage], scheduler=self.schedulers[stage])
            predictor.predict(horizon, [(mine[name], mine[name].detach(), each.data) for name, each in named.items()])
        elif self.make_optimizer and horizon and self.unstepped[stage][0]:
            self._step_ahead(stage, named)
        for name, each in named.items():
            self.forwards.setdefault((stage, name, batch), each.detach().clone())
        yield
        self.show(stage, named)

    def _step_ahead(self, stage, named) -> None:
        """The optimizer's own step on copies, with the gradients that are there."""
        number, size = self.unstepped[stage]
        mine, true = self.stepped[stage], self.optimizers[stage]
        copies = {name: each.detach().clone().requires_grad_() for name, each in mine.items()}
        optimizer = self.make_optimizer(copies.values())
        for name, each in copies.items():
            each.grad = named[name].grad * (size / number)
            if mine[name] in true.state:
                optimizer.state[each] = copy.deepcopy(true.state[mine[name]])
        for group, of in zip(optimizer.param_groups, true.param_groups, strict=True):
            group["lr"] = of["lr"]
        optimizer.step()
        for name, each in copies.items():
            named[name].data.copy_(each.detach())


def _replay(graph, nodes, named, rule, stretch, of, batches, recompute, losses, norms, choose):
    made, back, kept, sums = {}, {}, {}, {}
    next_forward, next_backward = ([stretch.start] * len(nodes) for _ in range(2))
    while min(next_backward) < stretch.stop:
        stage = choose.randrange(len(nodes))
        node, depth = nodes[stage], graph.depth(stage)
        sources, targets = graph.makers(Travelling.ACTIVATION, stage), graph.makers(Travelling.GRADIENT, stage)
        i, j = next_forward[stage], next_backward[stage]
        if i < stretch.stop and i - j <= depth:  # a forward
            if any((source, stage, i) not in made for source in sources):
                continue
            inputs = {source: made.pop((source, stage, i)) for source in sources}
            if recompute and depth:
                with torch.no_grad(), rule.forward(stage, of[i - stretch.start], named[stage]):
                    outputs, loss = node(data_of(i), inputs)
                    handed = _copies(outputs)
                kept[stage, i] = inputs, None
            else:
                kept[stage, i] = _leaves(inputs, graph, stage)
                with rule.forward(stage, of[i - stretch.start], named[stage]):
                    outputs, loss = node(data_of(i), kept[stage, i])
                    handed = _copies(outputs)
                kept[stage, i] = kept[stage, i], (outputs, loss)
            if loss is not None:
                losses[of[i - stretch.start]].append(loss.item())
            made |= {(stage, target, i): tensors for target, tensors in handed.items()}
            next_forward[stage] += 1
        elif j < i and all((target, stage, j) in back for target in targets):
            inputs, ran = kept.pop((stage, j))
            if ran is None:
                inputs = _leaves(inputs, graph, stage)
                ran = node(data_of(j), inputs)
            outputs, loss = ran
            batch = of[j - stretch.start]
            roots, grads = ([loss / batches[batch]], [None]) if loss is not None else ([], [])
            for target in sorted(targets, reverse=True):
                roots += [each for each in outputs[target] if each.is_floating_point()]
                grads += back.pop((target, stage, j))
            here = [pair for pair in zip(roots, grads, strict=True) if pair[1] is not _LATER]
            torch.autograd.backward(*zip(*here, strict=True))
            ends = j + 1 == stretch.stop or of[j + 1 - stretch.start] != batch
            rule.unstepped[stage] = rule.unstepped[stage][0] + 1, batches[batch]
            for source in graph.takers(Travelling.GRADIENT, stage):
                found = [each.grad for each in inputs[source] if each.is_floating_point()]
                if node.sources[source].activations.has_shared:
                    total = sums.pop((stage, source), None)
                    total = found[-1] if total is None else total + found[-1]
                    found[-1] = total if ends else _LATER
                    if not ends:
                        sums[stage, source] = total
                back[stage, source, j] = found
            next_backward[stage] += 1
            if ends:
                for name, each in named[stage].items():
                    rule.stepped[stage][name].grad = each.grad
                    norms[batch][stage] += each.grad.norm(dtype=torch.float64).item() ** 2
                    each.grad = None
                rule.step(stage, named[stage])


def _copies(outputs):
    """Among them is the shared weight, which its owner steps."""
    return {target: tuple(each.detach().clone() for each in tensors) for target, tensors in outputs.items()}


_LATER = object()  # a gradient of the shared weight that comes with the last microbatch of the batch


def _leaves(inputs, graph, stage):
    wanted = graph.takers(Travelling.GRADIENT, stage)
    return {
        source: tuple(each.detach().requires_grad_(source in wanted and each.is_floating_point()) for each in tensors)
        for source, tensors in inputs.items()
    }


def _cut(tensors, graph, source, target):
    edge = graph.edges[graph.edge_between(source, target)]
    return tensors if edge.gradient else tuple(each.detach() for each in tensors)


@dataclass
class Built:
    """This rank's part of a pipeline. `versions`: by stage."""

    engine: PipelineEngine
    stages: list[GraphModuleStage]
    versions: dict[int, WeightVersions]
    job: dist.ProcessGroup

    def close(self) -> None:
        dist.barrier()
        self.engine.close()
        dist.destroy_process_group(self.job)


def build(
    shape: Shape,
    *,
    preset: str,
    recompute: bool = False,
    clip_grad: float = 0.0,
    tracing: bool = False,
    lr: float = 0.1,
    kind: str = "sgd",
    predict: bool = False,
    provisional: bool = False,
    gap_aware: bool = False,
    slow: float = 0.0,
    backend: str = "gloo",
    device: str = "cpu",
) -> Built:
    """This rank's stages. `preset` "stale": FTPipe's; `predict`, `provisional`: with such weights; `gap_aware`:
    steps are. `slow`: seconds, of which each computation sleeps a random part.
    """
    graph, rank = shape.graph, dist.get_rank()
    cut = {"num_stages": graph.num_stages, "rank_of_stage": shape.rank_of_stage, "edges": shape.edges}
    if preset == "stale":
        weights = "stale-predicted" if predict else "stale-provisional" if provisional else "stale"
        schedule = Schedule(order="async", weights=weights, recompute=recompute, **cut)
    else:
        schedule = Schedule.preset(preset, recompute=recompute, **cut)
    nodes = {stage: Node(shape, stage).to(device) for stage in schedule.stages_of(rank)}
    delays = random.Random(rank)
    for node in nodes.values() if slow else ():
        node.register_forward_pre_hook(lambda *_: time.sleep(delays.uniform(0, slow)))
    of_stage = {
        stage: {f"{stage}.{name}": each for name, each in node.named_parameters()} for stage, node in nodes.items()
    }
    parameters = {name: each for own in of_stage.values() for name, each in own.items()}
    if preset == "stale":
        ahead = schedule.weights.ahead
        make = partial(WeightVersions, window=1) if ahead is None else partial(AheadVersions, ahead=ahead)
        versions_of = {stage: make(own) for stage, own in of_stage.items()}
    else:
        versions_of = dict.fromkeys(nodes, WeightVersions(parameters, window=1))
    stages = [
        GraphModuleStage(
            node, index=stage, graph=graph, versions=versions_of[stage], data=partial(data_of, device=device),
            has_loss=node.is_last, recompute=schedule.recomputes(stage), device=device,
            edges={
                edge.target if edge.source == stage else edge.source: shape.tensors_of(edge)
                for edge in graph.edges
                if stage in (edge.source, edge.target)
            },
        )
        for stage, node in nodes.items()
    ]  # fmt: skip
    job = dist.new_group(list(range(dist.get_world_size())))
    if preset == "stale":
        updates = {}
        for stage, own in of_stage.items():
            optimizer = optimizer_of(own.values(), lr=lr, kind=kind)
            updates[stage] = ModuleUpdate(
                own, versions=versions_of[stage], num_grad_buffers=1,
                optimizer=GapAware(optimizer) if gap_aware else optimizer,
                scheduler=scheduler_of(optimizer, kind=kind), device=device,
            )  # fmt: skip
        update = StageUpdates(updates, job_group=job, device=device)
    else:
        update = ModuleUpdate(
            parameters, versions=next(iter(versions_of.values())), clip_grad=clip_grad, num_grad_buffers=1,
            optimizer=optimizer_of(parameters.values()), job_group=job, device=device,
        )  # fmt: skip
    tracer = Tracer(num_batches=64) if tracing else None
    engine = PipelineEngine(
        schedule, stages, update, timeout=timedelta(seconds=20), tracer=tracer, backend=backend, device=device
    )
    return Built(engine, stages, versions_of, job)


def run(shape: Shape, *, batches: Sequence[int], evaluate: int = 0, **options) -> Outcome:
    """Train this rank's stages; after the second batch drain, and evaluate on `evaluate` microbatches if not 0.
    `options`: those of `build`.
    """
    built = build(shape, **options)
    engine, reports, evaluations = built.engine, [], []
    for batch, size in enumerate(batches):
        reports += engine.run_batch(size, size * SAMPLES)
        if batch == 1 and evaluate:
            reports += engine.drain()
            evaluations.append(engine.evaluate(evaluate))
    reports += engine.drain()
    built.close()
    return Outcome(
        reports,
        {name: each.cpu().clone() for of in {*built.versions.values()} for name, each in of.newest_tensors().items()},
        evaluations,
        engine.saved.peaks,
        (len(engine._executor._exchange), sum(len(stage.activations) for stage in built.stages)),
        gather_traces(engine.trace()) if engine.tracer is not None else None,
        {stage: each.num_made for stage, each in built.versions.items() if isinstance(each, AheadVersions)},
        engine.bytes_sent,
    )
