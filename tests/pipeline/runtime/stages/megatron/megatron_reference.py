"""What plain torch makes of a case in one process, without any of the project's runtime.

W(t+1) = W(t) - update(g(W(t-1))) under 2bw, g(W(t)) under flush and gpipe, PipeDream's delays under pipedream,
with torch's AdamW or SGD on FP32 weights, on the same GPTModel without DDP, optimizers or schedules of megatron.core.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_updated_expert_bias
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper
from megatron.pipeline.runtime.stages.megatron.data_and_dropout import SeededDropout
from tests.pipeline.runtime.stages.megatron.megatron_model import (
    Case,
    forward_step,
    global_names,
    parallel,
    training_data,
    whole_model,
)

DELAYS = {"2bw": 1, "3bw": 2, "4bw": 3}  # schedule -> how many batches old the weights of a batch are; others: 0


def reference(**options) -> dict:
    """Losses, norms and final weights (both versions) of the case, computed without any of the project's runtime.

    In one process, or in as many as share a sequence, where scales in FP8 are those of each one's tokens.
    """
    case = Case(**options)
    single = replace(
        case,
        p=1,
        v=1,
        t=1,
        d=1,
        cp=torch.distributed.get_world_size(),
        sequence_parallel=False,
        distributed_optimizer=False,
        puts_off=False,
        fused=False,
    )
    with parallel(single):
        return _reference(single, case)


def _reference(case: Case, original: Case) -> dict:
    model = whole_model(case)
    half = case.dtype != "float32"
    module = Float16Module(model.config, model) if half else model
    dropout = SeededDropout(model, seed=1234)
    params = global_names(model)
    masters = {name: param.detach().clone().float() for name, param in params.items()}
    optimizer = make_optimizer(case, masters)
    delay = DELAYS.get(case.schedule, 0)
    versions = [{name: master.clone() for name, master in masters.items()}]
    scales = LossScale(case, delay + 1)
    samples_done, results = 0, []
    routers, biases = Routers(model), [None]
    biases[0] = routers.biases()
    step, data = forward_step(case), training_data(case, 0)
    if case.balancing == "global_aux_loss" and original.d > 1:
        data = routers.over_replicas(original.d, data, lambda each: step(iter([each]), module))
    shares = factor_of_gradients(case, original)
    microbatch_index = 0
    for batch, count in enumerate(case.batches):
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(versions[version_used(original, batch, name)][name])
        routers.show(biases[max(batch - delay, 0)])
        model.set_is_first_microbatch()  # in FP8, weights are cast for it
        batch_scale = scales.of_batch(batch)
        gradients = {name: torch.zeros_like(master) for name, master in masters.items()}
        replicas = [dict.fromkeys(gradients) for _ in range(original.d)]
        losses, further, parts = [], [], 1 if case.per_token else count // original.d
        for position in range(count):
            with dropout.microbatch(microbatch_index * case.micro_batch_size):
                output, loss_function = step(data, module)
                result = loss_function(output)
                scale_other_losses(batch_scale / parts)
                losses.append(over_context(torch.tensor(_reported(result), dtype=torch.float64)).tolist())
                further.append(take_further_losses())
                (loss_to_differentiate(case, result) / parts).backward(torch.tensor(batch_scale * shares))
            replica = replicas[position % original.d]
            for name, param in params.items():
                gradient = param.grad.float() / shares
                replica[name] = gradient.clone() if replica[name] is None else replica[name] + gradient
                param.grad = None
            microbatch_index += 1
        for name in gradients:
            gradients[name] = sum(replica[name] * (1.0 if case.per_token else 1.0 / original.d) for replica in replicas)
            gradients[name] = over_context(gradients[name])
        scale = batch_scale * (sum(tokens for _, tokens in losses) if case.per_token else 1.0)
        norm = math.sqrt(sum(float(g.norm().double() ** 2) for g in gradients.values())) / scale
        counts = routers.counts()
        biases.append(routers.moved(biases[-1], counts))
        routers.reset()
        overflow = case.dtype == "float16" and not math.isfinite(norm)
        lr = _learning_rate(case, samples_done)
        if not overflow:
            coefficient = 1.0 / scale
            clip_norm = results[-1]["norm"] if case.single_gradient_buffer and batch > 0 else norm
            if case.clip > 0 and case.clip / (clip_norm + 1e-6) < 1:
                coefficient *= case.clip / (clip_norm + 1e-6)
            for name, master in masters.items():
                master.grad = gradients[name] * coefficient
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            samples_done += count * case.micro_batch_size
        scales.step(batch_scale, overflow=overflow)
        versions.append({name: master.clone() for name, master in masters.items()})
        results.append(
            {
                "loss": sum(total for total, _ in losses) / sum(tokens for _, tokens in losses),
                "further": means(further),
                "norm": norm,
                "lr": lr,
                "overflow": overflow,
                "scale": batch_scale,
                "tokens": counts,
            }
        )
    newest, older = versions[-1], versions[-1 - (delay or 1)]
    cast = {name: tensor.to(case.torch_dtype).float() for name, tensor in newest.items()}
    cast_older = {name: tensor.to(case.torch_dtype).float() for name, tensor in older.items()}
    return {"batches": results, "newest": cast, "older": cast_older}


def factor_of_gradients(case: Case, original: Case) -> int:
    """Ranks that share sequences have as many times the gradients, and average. That says what FP8 makes of them, since
    the first scale is 1."""
    return original.cp // case.cp if case.engine and not case.per_token else 1


def over_context(value: Tensor) -> Tensor:
    """The mean over the processes of the reference, which share sequences."""
    if torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(value)
    return value / torch.distributed.get_world_size()


def scale_other_losses(factor: float) -> None:
    """What multiplies the auxiliary losses of routers, and those of further tokens, in the backward that comes."""
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(factor))
    MTPLossAutoScaler.set_loss_scale(torch.tensor(factor))


def take_further_losses() -> list[float]:
    """The losses of further tokens of the microbatch whose forward was the last, out of megatron.core's table."""
    table = MTPLossLoggingHelper.tracker
    return table.pop("values", table.pop("loss_values", torch.zeros(0))).tolist()


def means(losses: list[list[float]]) -> list[float]:
    """Of each loss, its mean over the microbatches."""
    return [sum(each) / len(each) for each in zip(*losses, strict=True)]


class Routers:
    """The routers of a model in one process, moved and reset at the end of a batch as `finalize_model_grads` does."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._config = model.config
        self._routers = [each for each in model.modules() if isinstance(each, TopKRouter)]
        for router in self._routers:
            router.local_tokens_per_expert = torch.zeros(self._config.num_moe_experts)
            router.enable_expert_bias = True  # counts, also without biases
            router._maintain_float32_expert_bias()

    def biases(self) -> list[torch.Tensor]:
        return [router.expert_bias.clone() for router in self._routers if router.expert_bias is not None]

    def show(self, biases: list[torch.Tensor]) -> None:
        for router, bias in zip(self._routers, biases, strict=False):
            router.expert_bias.copy_(bias)

    def counts(self) -> list[list[float]]:
        return [router.local_tokens_per_expert.tolist() for router in self._routers]

    def moved(self, biases: list[torch.Tensor], counts: list[list[float]]) -> list[torch.Tensor]:
        rate, result = self._config.moe_router_bias_update_rate, []
        for bias, row in zip(biases, counts, strict=False):
            result.append(get_updated_expert_bias(torch.tensor([row]), bias[None], rate)[0])
        return result

    def over_replicas(self, num_replicas: int, data: Iterator[dict], run: Callable[[dict], object]) -> Iterator[dict]:
        """The microbatches of replicas in turn. `global_aux_loss` has the tokens of all microbatches that run at the
        same time; so before each the routers have those of the others, which `run` has counted before."""
        for config in {id(router.config): router.config for router in self._routers}.values():
            config.moe_aux_loss_coeff /= num_replicas**2  # in which the loss divides by the number of tokens
        while together := list(itertools.islice(data, num_replicas)):
            counted = [router.local_tokens_per_expert.clone() for router in self._routers]
            before = [(router.global_tokens_per_expert.clone(), router.ga_steps.clone()) for router in self._routers]
            own = []
            for each in together:
                self._restart([torch.zeros_like(count) for count in counted], before)
                run(each)
                own.append([router.local_tokens_per_expert.clone() for router in self._routers])
            self._restart(counted, before)
            for place, each in enumerate(together):
                others = [sum(rows) - rows[place] for rows in zip(*own, strict=True)]
                counts = [router.local_tokens_per_expert for router in self._routers]
                self._restart(
                    counts, [(total + more, steps) for (total, steps), more in zip(before, others, strict=True)]
                )
                yield each

    def _restart(self, counts: list[torch.Tensor], before: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for router, count, (total, steps) in zip(self._routers, counts, before, strict=True):
            router.local_tokens_per_expert.copy_(count)
            router.global_tokens_per_expert.copy_(total)
            router.ga_steps.copy_(steps)

    def reset(self) -> None:
        for router in self._routers:
            router.local_tokens_per_expert.zero_()
            router.reset_global_aux_loss_tracker()


def make_optimizer(case: Case, masters: dict[str, torch.Tensor]) -> torch.optim.Optimizer:
    groups = [
        {"params": [m for m in masters.values() if m.dim() > 1], "weight_decay": case.weight_decay},
        {"params": [m for m in masters.values() if m.dim() == 1], "weight_decay": 0.0},
    ]
    if case.optimizer == "adam":
        return torch.optim.AdamW(groups, lr=case.lr, betas=(0.9, 0.999), eps=case.adam_eps)
    return torch.optim.SGD(groups, lr=case.lr, momentum=0.9)


class LossScale:
    """The loss scale of each batch: what the step `lag` batches before it has left, halved by an overflow of a batch
    that had the newest scale, doubled after three batches without one.
    """

    def __init__(self, case: Case, lag: int) -> None:
        self._is_dynamic = case.dtype == "float16" and not case.loss_scale
        first = case.loss_scale or (case.initial_loss_scale if case.dtype == "float16" else 1.0)
        self._scales, self._lag, self._growth = [first], lag, 0  # after so many steps

    def of_batch(self, batch: int) -> float:
        return self._scales[max(batch - self._lag + 1, 0)]

    def step(self, batch_scale: float, *, overflow: bool) -> None:
        """The step of the next batch, which had this scale, is taken, or left out."""
        scale = self._scales[-1]
        if self._is_dynamic:
            self._growth = 0 if overflow else self._growth + 1
            if overflow and batch_scale <= scale:
                scale = max(scale / 2, 1.0)
            elif self._growth == 3:
                scale, self._growth = scale * 2, 0
        self._scales.append(scale)


def loss_to_differentiate(case: Case, result: tuple) -> torch.Tensor:
    """The microbatch's mean over its tokens, or their sum."""
    return result[0] / result[1] if len(result) == 3 and not case.per_token else result[0]


def _reported(result: tuple) -> tuple[float, float]:
    """The microbatch's "lm loss": its sum and count, or a mean and 1."""
    value = result[-1]["lm loss"].reshape(-1)
    return float(value[0]), float(value[1]) if len(value) == 2 else 1.0


def version_used(case: Case, batch: int, name: str) -> int:
    """The version with which a batch computes the parameter `name`: flush, 2bw and the like, or PipeDream's per-stage
    delays.
    """
    if case.schedule in DELAYS:
        return max(batch - DELAYS[case.schedule], 0)
    if case.schedule != "pipedream":
        return batch
    return max(batch - (case.p - 1 - case.stage_of(name)), 0)


def _learning_rate(case: Case, samples: int) -> float:
    if case.warmup and samples <= case.warmup:
        return case.lr * samples / case.warmup
    total = 4 * sum(case.batches) * case.micro_batch_size
    return case.lr * (1 - (samples - case.warmup) / (total - case.warmup))
