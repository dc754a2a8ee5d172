"""Layers of a captured model that freeze during training (PipeTransformer, section 3.2), and train again.

`megatron.elastic.freezing` decides which layers freeze. At a change the pipeline is drained, and each rank builds its
stages anew: a frozen parameter requires no gradient, so it has no gradient buffer, no optimizer's state and no weight
versions, and no gradient travels before the first trained parameter. A stage without trained parameters at or before
it computes only forwards. Parameters that continue to train keep weights, moments and versions bit for bit.

Frozen layers compute as in training, dropout included, like a model whose `requires_grad` is switched off. So results
do not depend on whether a layer shares its stage with trained layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.capture.blocks import blocks_of
from megatron.capture.export import Captured
from megatron.capture.layers import stages_of_layers
from megatron.capture.profile import parameters_of
from megatron.capture.tensors import FolderTensors, Wanted
from megatron.elastic.freezing import RULES, FreezeRule, FreezeSettings, LayerNorms, Validation, ValidationWatch
from megatron.finetuning.assembly import BuiltPipeline, build_pipeline
from megatron.finetuning.freezing_arguments import FREEZE_ALPHA
from megatron.finetuning.optimizers import optimizer_order
from megatron.finetuning.plan import RunPlan, with_frozen
from megatron.pipeline.library.ranks import Ranks
from megatron.pipeline.runtime.failure.agreement import gathered
from megatron.pipeline.runtime.stages.module.rank_update import TOGETHER
from megatron.pipeline.runtime.update.optimizer_wrappers import MasterWeights


def layers_of_parameters(captured: Captured) -> tuple[dict[str, int], int]:
    """The layer of each parameter, and the number of layers.

    Embeddings belong to the first layer. A parameter that several layers share belongs to the last of them, and the
    head to the last layer, which never freezes. Raises ValueError for a model with fewer than two numbered layers.
    """
    try:
        stages = stages_of_layers(captured)
    except ValueError as error:
        raise ValueError(
            f"--freeze_training freezes numbered layers, and {captured.model_name} has fewer than two; leave it out"
        ) from error
    found: dict[str, int] = {}
    for layer, block in zip(stages, blocks_of(captured), strict=True):
        for name in parameters_of(captured, block):
            found[name] = max(found.get(name, 0), layer)
    return found, max(stages) + 1


@dataclass
class Freezer:
    """The decisions of one run, the same on all ranks.

    Attributes:
        layer_of: name of a parameter -> its layer.
        fixed: the parameters that the model never trains, such as Whisper's positions.
        plan: the plan of the current pipeline.
        most: the most layers that can freeze.
        num_frozen: number of frozen layers.
        has_ended: validation has fallen, so no layer freezes any more.
    """

    args: argparse.Namespace
    plan: RunPlan
    ranks: Ranks
    layer_of: Mapping[str, int]
    fixed: frozenset[str]
    num_layers: int
    most: int
    rule: FreezeRule
    watch: ValidationWatch
    norms: LayerNorms
    num_frozen: int = 0
    has_ended: bool = False
    _interval: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(args: argparse.Namespace, plan: RunPlan, ranks: Ranks, saved: Mapping[str, Any] | None) -> Freezer | None:
        """The freezer that the flags ask for, with the state `saved` of a checkpoint; None without --freeze_training.

        Raises ValueError for a pipeline that cannot have frozen stages, numbers of layers that do not fit the model,
        and a checkpoint with frozen layers without --freeze_training.
        """
        if not args.freeze_training:
            if saved is not None:
                raise ValueError(f"{args.resumed_from} was made with --freeze_training; give it again")
            return None
        if saved is None and args.resumed_from is not None and args.do_train:
            raise ValueError(f"{args.resumed_from} was made without --freeze_training; leave it out")
        schedule, relays = plan.schedule, plan.schedule.residency is not None
        if not relays and (not schedule.graph.is_chain or schedule.num_ranks < schedule.num_stages):
            raise ValueError(
                "--freeze_training needs a chain of stages, one on each device, and the partition has another form; "
                "partition with --max_stages_per_device 1"
            )
        layer_of, num_layers = layers_of_parameters(plan.captured)
        shared = sorted(key for key in plan.crossing.routes if isinstance(key, str))
        early = [name for name in shared if layer_of[name] < num_layers - 1]
        early += plan.tied if relays else ()  # each stage has a copy, and the last one's trains on
        if early:
            raise ValueError(
                f"--freeze_training would freeze {early[0]}, which several stages share; give another partition, or "
                "leave it out"
            )
        alpha = FREEZE_ALPHA if args.freeze_alpha is None else args.freeze_alpha
        settings = FreezeSettings(num_layers, alpha, args.freeze_counts)
        rule = RULES["schedule" if args.freeze_counts else "gradients"](settings)
        watch = ValidationWatch(args.freeze_watch_validation)
        fixed = frozenset(name for name, each in plan.captured.parameters.items() if not each.requires_grad)
        most = num_layers - 1
        if relays:  # the last stage of each rank has backwards in any case
            owner, first = plan.crossing.owner, schedule.num_stages - schedule.num_ranks
            most = min(layer for name, layer in layer_of.items() if owner[name] >= first)
        if most == 0 or max(args.freeze_counts, default=0) > most:
            raise ValueError(
                f"--freeze_training: under l2l on {schedule.num_ranks} ranks {most} of {num_layers} layers can freeze, "
                "as the last one of each rank is trained; freeze fewer, or give more layers to a rank"
            )
        made = Freezer(args, plan, ranks, layer_of, fixed, num_layers, most, rule, watch, LayerNorms(num_layers))
        if saved is not None:
            made._load(saved)
        return made

    def _load(self, saved: Mapping[str, Any]) -> None:
        self.rule.load_state_dict(saved["rule"])
        self.watch.load_state_dict(saved["watch"])
        self.norms.load_state_dict(saved["norms"][self.ranks.rank])
        self.num_frozen, self.has_ended = saved["num_frozen"], saved["has_ended"]
        self.plan = self._plan_of(self.num_frozen)

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint. Collective: every rank must call it."""
        return {
            "num_frozen": self.num_frozen, "has_ended": self.has_ended, "rule": self.rule.state_dict(),
            "watch": self.watch.state_dict(), "norms": self._gathered(),
        }  # fmt: skip

    def observe(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients of a batch, or their norms: means over its samples, before clipping.

        Called when a batch is stepped.
        """
        squares = [0.0] * self.num_layers
        for name, gradient in gradients.items():
            if any(part.isdigit() for part in name.split(".")):  # embeddings and heads do not count
                squares[self.layer_of[name]] += torch.linalg.vector_norm(gradient, dtype=torch.float64).item() ** 2
        self.norms.add(squares)

    def due(self, step: int) -> bool:
        """Whether an interval ends after `step` batches."""
        since = step - self.args.freeze_start
        return not self.has_ended and since > 0 and since % self.args.freeze_interval == 0

    def judge(self, step: int, found: Mapping[str, float]) -> str | None:
        """Note an evaluation; freezing ends if validation has become worse. Returns a warning, or None."""
        name = "accuracy" if "accuracy" in found else "loss"
        warning = self.watch.note(Validation(name, found[name], name == "accuracy", step, self.num_frozen))
        self.has_ended |= self.watch.has_fallen
        return warning

    def decide(self, *, is_due: bool) -> int:
        """The number of layers to freeze from now on. Collective if `is_due`."""
        if self.has_ended:
            return 0
        if not is_due:
            return self.num_frozen
        gathered, total = self._gathered(), LayerNorms(self.num_layers)
        sums = [sum(layer) for layer in zip(*(each["sums"] for each in gathered), strict=True)]
        total.load_state_dict({"sums": sums, "count": max(each["count"] for each in gathered)})
        self.norms.take()
        return min(self.most, max(self.num_frozen, self.rule.decide(total.take())))

    def _gathered(self) -> list[dict[str, Any]]:
        """The norms of each rank of the first replica; gradients are equal on all replicas."""
        found = gathered(self.norms.state_dict())
        return [found[rank] for rank in self.ranks.pipelines[0]]

    def _plan_of(self, num_frozen: int) -> RunPlan:
        frozen = {name for name, at in self.layer_of.items() if at < num_frozen}
        return with_frozen(self.plan, self.args, frozen | self.fixed)

    def change(self, pipeline: BuiltPipeline, num_frozen: int, *, summary, num_steps: int) -> BuiltPipeline:
        """Close `pipeline` and return a pipeline with `num_frozen` frozen layers in its place.

        Layers that train again keep their weights. The state of their optimizer begins anew, since their moments were
        dropped. torch counts the steps of each parameter separately, so the other layers keep their counts.

        Collective: every rank must call it. Precondition: the pipeline is drained.
        """
        plan = self._plan_of(num_frozen)
        kept = _Kept.of(pipeline, plan, Path(self.args.model_name_or_path))
        engine = pipeline.engine
        engine.close()
        new = build_pipeline(
            plan, self.args, feed=pipeline.feed, summary=summary, pretrained=kept, ranks=pipeline.ranks,
            num_steps=num_steps, first_batch=engine.next_batch, first_microbatch=engine.next_microbatch,
            groups=pipeline.groups, observe=self.observe,
        )  # fmt: skip
        kept.hand_over(new, plan, engine.next_batch)
        if plan.schedule.residency is not None:
            new.updates[TOGETHER].ledger.take_over(pipeline.updates[TOGETHER].ledger)
        self.plan, self.num_frozen = plan, num_frozen
        return new


@dataclass
class _Kept:
    """The state that one pipeline of this rank hands to the next; takes the place of `Pretrained`.

    Attributes:
        tensors: name -> newest value; FP32 where there are masters.
        versions: version -> name -> weight; empty under l2l, whose one version is `tensors`.
        moments: name -> the optimizer's state.
        groups: the options of the optimizer's groups.
    """

    folder: Path
    tensors: dict[str, Tensor]
    versions: dict[int, dict[str, Tensor]]
    moments: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    scheduler: dict[str, Any]
    statistics: dict[int, dict[str, Tensor]]

    @staticmethod
    def of(pipeline: BuiltPipeline, plan: RunPlan, folder: Path) -> _Kept:
        update, tensors, trained = pipeline.updates[TOGETHER], {}, set()
        relays = plan.schedule.residency is not None
        for index, module in pipeline.modules.items():
            pipeline.versions[index].show_newest()
            tensors.update(module.stage.state_dict())
            trained.update(module.parameters_by_name())
        state = _inner(update.optimizer).state_dict()
        names = optimizer_order(trained, plan.decays)

        def copied(version: Mapping[str, Tensor]) -> dict[str, Tensor]:
            # The new versions take over the memory of the newest ones, and are written in another order.
            return {name: tensor.clone() for name, tensor in version.items()}

        return _Kept(
            folder, tensors | {name: each.detach() for name, each in pipeline.exact.items() if name in tensors},
            {} if relays else {at: copied(update.versions.tensors(at)) for at in update.versions.live()},
            {names[number]: moments for number, moments in state["state"].items()},
            [{name: each for name, each in group.items() if name != "params"} for group in state["param_groups"]],
            update.scheduler.state_dict(), pipeline.statistics(),
        )  # fmt: skip

    def read(self, files: FolderTensors, wanted: Mapping[str, Wanted]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of this rank, which has them already."""
        yield from ((name, self.tensors[name]) for name in wanted)

    def hand_over(self, pipeline: BuiltPipeline, plan: RunPlan, step: int) -> None:
        """Give a new pipeline the versions, the optimizer's state and the scheduler."""
        update = pipeline.updates[TOGETHER]
        trained = {name for module in pipeline.modules.values() for name in module.parameters_by_name()}
        names = optimizer_order(trained, plan.decays)
        if names and plan.schedule.residency is None:
            # All versions of a layer that was frozen are the weights with which it was frozen.
            own, window = update.versions.newest_tensors(), update.versions.window
            live = dict.fromkeys(range(max(step - window + 1, 0), step + 1), own)
            if step in self.versions:
                live = {at: own | {n: t for n, t in its.items() if n in own} for at, its in self.versions.items()}
            update.versions.restore(live)
        optimizer = _inner(update.optimizer)
        state = optimizer.state_dict()
        state["state"] = {at: self.moments[name] for at, name in enumerate(names) if name in self.moments}
        for group, kept in zip(state["param_groups"], self.groups, strict=True):
            group.update(kept)
        optimizer.load_state_dict(state)
        update.scheduler.load_state_dict(self.scheduler)
        pipeline.load_statistics(self.statistics)


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    return optimizer.optimizer if isinstance(optimizer, MasterWeights) else optimizer
