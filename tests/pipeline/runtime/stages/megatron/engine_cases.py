"""What the ranks of the tests of Transformer Engine's layers run, on the stand-in of tests/stand_ins."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from unittest import mock

import torch

from megatron.pipeline.runtime.contract.stage import BatchInfo, Microbatch
from megatron.pipeline.runtime.stages.megatron.engine_linears import EngineLinears
from megatron.pipeline.runtime.stages.megatron.optimistic_update import MegatronOptimisticUpdate
from megatron.pipeline.runtime.stages.megatron.stage import MegatronStage
from tests.pipeline.runtime.stages.megatron import fused_accumulation
from tests.pipeline.runtime.stages.megatron import megatron_cases as cases

TWO = [Microbatch(index, 0, index, 2) for index in (0, 1)]


def train(**options) -> dict:
    """`cases.train`, with fused accumulation in megatron.core's own output layer, too, where the case asks for it."""
    with fused_accumulation.stand_in() if options.get("fused") else nullcontext():
        return cases.train(**options)


@dataclass
class InFP8:
    """What a rank trained; of how many batches a stage kept weights in FP8 at once; and at last the scales of delayed
    scaling, forwards before backwards, of each layer."""

    result: dict
    num_kept: int
    scales: list[list[float]]


def train_in_fp8(**options) -> InFP8:
    kept, scales, show = [], {}, EngineLinears.show_batch

    def counted(linears: EngineLinears, batch: int | None) -> None:
        show(linears, batch)
        kept.append(len(linears._casts))
        assert linears._waiting.keys() <= linears._casts.keys()  # nothing stays of batches that have ended
        for module in linears._casting:
            for key in ("scaling_fwd", "scaling_bwd"):
                if key in module.fp8_meta:
                    scales[id(module), key] = module.fp8_meta[key].scale

    with mock.patch.object(EngineLinears, "show_batch", counted):
        result = train(**options)
    return InFP8(result, max(kept), [each.tolist() for each in scales.values()])


@contextmanager
def begun_stage(**options) -> Iterator[MegatronStage]:
    """A stage of two layers that has begun a batch of two microbatches."""
    case = cases.Case(batches=(2,), layers=2, **{"engine": True} | options)
    with cases.parallel(case):
        (stage,), update = cases.build(case)
        info = BatchInfo(0, 2, 2 * case.micro_batch_size)
        stage.load_version(0)
        update.begin_batch(info)
        update.begin_backward(info)
        yield stage


def evaluated(kept: bool, **options) -> float:
    """The loss of a microbatch that only a forward takes, with weights that were halved behind one that was trained.
    `kept`: as the runtime has it; else layers keep no weights in FP8 at all.
    """
    with begun_stage(**options) as stage:
        stage.forward(TWO[0], None)
        stage.backward(TWO[0], None)
        stage.take_losses(0)
        for module in stage.model.modules():
            module.disable_parameter_transpose_cache = not kept
            for parameter in module.parameters(recurse=False):
                parameter.data.mul_(0.5)
        stage.forward_only(TWO[1], None)
        return stage.take_losses(0)["lm loss"][0]


def begun_again(kept: bool, abandons: bool, **options) -> tuple[float, int]:
    """The loss of a microbatch whose first forward was dropped before the weights were halved; and of how many
    microbatches the backward is still awaited. `kept`: as in `evaluated`.
    """
    with begun_stage(**options) as stage:
        stage.begin_trial()
        for module in stage.model.modules():
            module.disable_parameter_transpose_cache = not kept
        stage.forward(TWO[0], None)
        if abandons:
            stage.abandon()
        else:
            stage.begin_again(TWO[:1])
        for parameter in stage.model.parameters():
            parameter.data.mul_(0.5)
        stage.forward(TWO[0], None)
        stage.backward(TWO[0], None)
        return stage.take_losses(0)["lm loss"][0], sum(stage._engine_linears._waiting.values())


def is_optimistic(**options) -> bool:
    """Whether an update that steps before the norm can be made."""
    case = cases.Case(batches=(2,), layers=1, engine=True, **options)
    with cases.parallel(case), mock.patch.object(cases, "MegatronWeightUpdate", MegatronOptimisticUpdate):
        try:
            cases.build(case)
        except AssertionError:
            return False
        return True


def gradients(
    order: tuple[str, ...], release: str | None = None, frozen: tuple[str, ...] = (), **options
) -> tuple[dict[str, torch.Tensor], dict]:
    """Gradients of two microbatches on the only stage, by name, after `order`, such as ("I0", "I1", "W0", "W1"); and
    what had gradients before the first W, by name, and the bytes that were kept for W by then, and at the end.

    `frozen`: parts of the names of parameters that are not trained.
    """
    from transformer_engine import _release

    case = cases.Case(batches=(2,), layers=2, engine=True, **options)
    fused = fused_accumulation.stand_in() if case.fused else nullcontext()
    with _release.release(release or _release.newest()), fused, cases.parallel(case):
        (stage,), update = cases.build(case)
        info, kept = BatchInfo(0, 2, 2 * case.micro_batch_size), {}
        named = {name: each for name, each in cases.global_names(stage.model.module).items()}
        for name, parameter in named.items():
            if any(part in name for part in frozen):
                parameter.requires_grad_(False)
        stage.load_version(0)
        update.begin_batch(info)
        update.begin_backward(info)
        if any(word[0] == "I" for word in order):
            stage.split_backward()
        for microbatch in TWO:
            stage.forward(microbatch, None)
        words = {"B": stage.backward, "I": stage.backward_input}
        for word in order:
            microbatch = TWO[int(word[1])]
            if word[0] != "W":
                words[word[0]](microbatch, None)
                continue
            if not kept:
                kept["before W"] = {name for name, parameter in named.items() if parameter.main_grad.any()}
                kept["bytes"] = [stage.deferred_bytes(each) for each in TWO]
            stage.backward_weights(microbatch)
        kept["bytes at the end"] = [stage.deferred_bytes(each) for each in TWO]
        assert all(parameter.grad is None for parameter in named.values())
        return {name: parameter.main_grad.clone() for name, parameter in named.items()}, kept


def refusal_without_queues() -> str:
    """What a stage says that is to split backwards of layers that put nothing off."""
    case = cases.Case(batches=(1,), layers=1, engine=True)
    with cases.parallel(case):
        (stage,), _ = cases.build(case)
        try:
            stage.split_backward()
        except ValueError as error:
            return str(error)
    return "nothing"
