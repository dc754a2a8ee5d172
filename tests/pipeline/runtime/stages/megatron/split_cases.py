"""What the ranks of the tests of split backwards run: training with whole backwards, and with others of them split."""

from contextlib import nullcontext

import torch

from megatron.pipeline.runtime.contract.stage import BatchInfo, Microbatch
from tests.pipeline.runtime.made_up_orders import registered
from tests.pipeline.runtime.stages.megatron import fused_accumulation
from tests.pipeline.runtime.stages.megatron import megatron_cases as cases

TWO = [Microbatch(index, 0, index, 2) for index in (0, 1)]


def deviations(whole: str, split: str, **options) -> dict[str, float]:
    """Trains one case under both schedules: the largest relative difference of losses and norms and the largest one of
    weights, and whether loss scales, learning rates and what was skipped are the same.
    """
    results = []
    with registered():
        for schedule in (whole, split):
            with fused_accumulation.stand_in() if options.get("fused") else nullcontext():
                results.append(cases.train(schedule=schedule, **options))
    expected, found = results
    same = ("overflow", "scale", "lr")
    pairs = list(zip(expected["batches"], found["batches"], strict=True))
    return {
        "numbers": max(
            abs(ours[name] / theirs[name] - 1)
            for theirs, ours in pairs
            for name in ("loss", "norm")
            if not theirs["overflow"]
        ),
        "weights": max(
            (found[version][name] - tensor).abs().max().item()
            for version in ("newest", "older")
            for name, tensor in expected[version].items()
        ),
        "decisions": float(any(ours[name] != theirs[name] for theirs, ours in pairs for name in same)),
    }


def gradients(split: bool, **options) -> tuple[dict[str, torch.Tensor], dict]:
    """Gradients of two microbatches on the only stage, by name, and what was kept at which point."""
    case = cases.Case(batches=(2,), layers=2, **options)
    with cases.parallel(case):
        (stage,), update = cases.build(case)
        info, kept = BatchInfo(0, 2, 2 * case.micro_batch_size), {}
        stage.load_version(0)
        update.begin_batch(info)
        update.begin_backward(info)
        if split:
            stage.split_backward()
        for microbatch in TWO:
            stage.forward(microbatch, None)
        names = {name: param for name, param in stage.model.module.named_parameters()}
        if split:
            for microbatch in TWO:
                stage.backward_input(microbatch, None)
            kept["after I"] = {name: bool(param.main_grad.any()) for name, param in names.items()}
            kept["bytes"] = [stage.deferred_bytes(microbatch) for microbatch in TWO]
            kept["num_saved"] = len(stage.activations)
            for microbatch in TWO:
                stage.backward_weights(microbatch)
            kept["bytes at the end"] = [stage.deferred_bytes(microbatch) for microbatch in TWO]
        else:
            for microbatch in TWO:
                stage.backward(microbatch, None)
        return {name: param.main_grad.clone() for name, param in names.items()}, kept


def refusals() -> dict[str, str]:
    """What `split_backward` says of what cannot be split."""
    case, said = cases.Case(batches=(1,), layers=1), {}
    with cases.parallel(case):
        (stage,), _ = cases.build(case)
        for name in ("defer_embedding_wgrad_compute", "enable_autocast"):
            setattr(stage._config, name, True)
            said[name] = _refusal(stage)
            setattr(stage._config, name, False)
        of_engine = type("LayerNormLinear", (torch.nn.Linear,), {"__module__": "transformer_engine.pytorch"})
        of_core = type("TELayerNormColumnParallelLinear", (of_engine,), {"__module__": "megatron.core.extensions"})
        norm = type("LayerNorm", (torch.nn.LayerNorm,), {"__module__": "transformer_engine.pytorch"})
        for name, extra in (("engine", of_engine(2, 2)), ("core", of_core(2, 2)), ("norm", norm(2))):
            stage.model.module.decoder.extra = extra
            said[name] = _refusal(stage)
        del stage.model.module.decoder.extra
        stage.split_backward()
    return said


def _refusal(stage) -> str:
    try:
        stage.split_backward()
    except ValueError as error:
        return str(error)
    return "nothing"
