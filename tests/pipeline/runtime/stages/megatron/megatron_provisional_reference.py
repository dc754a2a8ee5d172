"""What plain torch makes of a case with provisional weights, in one process and as a plain loop.

The step to come is taken on copies of the masters and of the optimizer, with what a part of the batch has; the batch
behind it is computed there. The weights themselves are 2BW's.
"""

import copy
import math
from dataclasses import replace

import torch
from torch import Tensor

from megatron.core.transformer.module import Float16Module
from megatron.pipeline.runtime.stages.megatron.data_and_dropout import SeededDropout
from tests.pipeline.runtime.stages.megatron.megatron_model import (
    Case,
    forward_step,
    global_names,
    parallel,
    training_data,
    whole_model,
)
from tests.pipeline.runtime.stages.megatron.megatron_reference import (
    LossScale,
    Routers,
    _learning_rate,
    _reported,
    factor_of_gradients,
    loss_to_differentiate,
    make_optimizer,
    means,
    scale_other_losses,
    take_further_losses,
)


def reference(**options) -> dict:
    """Losses, norms and final weights (the true ones, and the prediction that goes on) of the case."""
    case = Case(**options)
    single = replace(
        case, p=1, v=1, t=1, d=1, cp=1, e=1, cut_experts=True, sequence_parallel=False, distributed_optimizer=False
    )
    with parallel(single):
        return _reference(single, case)


def num_read(case: Case, name: str, num_microbatches: int) -> int:
    """How many of a replica's microbatches have gradients of a parameter that a prediction reads."""
    if case.provisional_microbatches is not None:
        return case.provisional_microbatches
    return num_microbatches - (case.p - 1 - stage_of(case, name))


def stage_of(case: Case, name: str) -> int:
    """The stage of a parameter; of tied embeddings that which has done the fewest microbatches."""
    return 0 if case.tied and "output_layer" in name else case.stage_of(name)


def _is_tied(case: Case, name: str) -> bool:
    ties = (case.tied or case.further > 0) and name.startswith("embedding.word")
    return case.p > 1 and (ties or (case.tied and "output_layer" in name))


def num_sharing(case: Case, name: str) -> int:
    """The replicas whose microbatches are in a rank's gradient of a parameter; tensor ranks cut experts."""
    return case.e if "local_experts" in name else 1


def shared_gradients(case: Case, partial: list[dict[str, Tensor]], replica: int) -> dict[str, Tensor]:
    """The mean gradients of the experts that a replica shares out with those beside it."""
    result = {}
    for name in partial[0]:
        sharing = num_sharing(case, name)
        first = replica // sharing * sharing
        if sharing > 1:
            result[name] = sum(sums[name] for sums in partial[first : first + sharing]) / sharing
    return result


def of_holders(case: Case, predicted: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Each replica's weights, with experts as the replica that holds them has predicted them."""

    def holder(replica: int, name: str) -> int:
        if num_sharing(case, name) == 1:
            return replica
        expert = int(name.split("local_experts.")[1].split(".")[0])
        return replica // case.e * case.e + expert * case.e // case.experts

    return [
        {name: predicted[holder(replica, name)][name] for name in weights} for replica, weights in enumerate(predicted)
    ]


def clip_factors(case: Case, gradients: dict[str, Tensor], last: float | None) -> dict[str, float]:
    """By name, the factor that clips: at most `last`, and at most what the norm of a stage asks for, or that of a
    tied embedding; these gradients have the least norm that they may have.
    """
    last = last or 1.0
    if case.clip == 0 or case.provisional_microbatches is not None:
        return dict.fromkeys(gradients, last)
    parts = {name: "ties" if _is_tied(case, name) else stage_of(case, name) for name in gradients}
    squares = dict.fromkeys(parts.values(), 0.0)
    for name, gradient in gradients.items():
        squares[parts[name]] += float(gradient.norm().double() ** 2)
    return {name: min(last, case.clip / (math.sqrt(squares[part]) + 1e-6)) for name, part in parts.items()}


def _reference(case: Case, original: Case) -> dict:
    model = whole_model(case)
    module = Float16Module(model.config, model) if case.dtype != "float32" else model
    dropout, params = SeededDropout(model, seed=1234), global_names(model)
    masters = {name: param.detach().clone().float() for name, param in params.items()}
    optimizer = make_optimizer(case, masters)
    true = _copy(masters)
    predicted = [true] * original.d
    stepped_from: dict[str, Tensor] | None = None  # what the last step changed; None: it was skipped
    scales = LossScale(case, 2)
    routers = Routers(model)
    biases = [routers.biases()]
    samples_done, clip, results = 0, (1.0 if case.clip == 0 else None), []
    tokens_of_each: float | None = None  # of a microbatch of all replicas, in the last batch that has stepped
    step, data, microbatch_index, waiting = forward_step(case), training_data(case, 0), 0, None
    factor = factor_of_gradients(case, original)

    def apply(batch: int, gradients: dict[str, Tensor], scale: float, _: float) -> None:
        """The step that takes the gradients of a batch."""
        nonlocal true, clip, samples_done, stepped_from
        stepped_from = None
        result = results[batch]
        result["lr"] = _learning_rate(case, samples_done)
        if not result["overflow"]:
            clip = 1.0
            if case.clip > 0:
                clip = min(1.0, case.clip / (result["norm"] + 1e-6))
            for name, master in masters.items():
                master.grad = gradients[name] * (clip / scale)
            for group in optimizer.param_groups:
                group["lr"] = result["lr"]
            optimizer.step()
            samples_done += case.batches[batch] * case.micro_batch_size
            stepped_from, true = true, _copy(masters)
        scales.step(result["scale"], overflow=result["overflow"])

    for batch, count in enumerate(case.batches):
        routers.show(biases[max(batch - 1, 0)])  # of the weights from which the prediction started
        batch_scale = scales.of_batch(batch)
        replicas = [{} for _ in range(original.d)]
        partial = [{} for _ in range(original.d)]
        own = count // original.d
        losses, further = [], []
        for position in range(count):
            replica = position % original.d
            with torch.no_grad():
                for name, param in params.items():
                    param.copy_(predicted[replica][name])
            if position == 0:
                model.set_is_first_microbatch()
            with dropout.microbatch(microbatch_index * case.micro_batch_size):
                output, loss_function = step(data, module)
                result = loss_function(output)
                each = 1 if case.per_token else own
                scale_other_losses(batch_scale / each)
                losses.append(_reported(result))
                further.append(take_further_losses())
                (loss_to_differentiate(case, result) / each).backward(torch.tensor(batch_scale * factor))
            for name, param in params.items():
                gradient = param.grad.float() / factor
                sums = replicas[replica]
                sums[name] = sums[name] + gradient if name in sums else gradient.clone()
                param.grad = None
                if position // original.d + 1 == num_read(original, name, own):
                    partial[replica][name] = sums[name].clone()
            microbatch_index += 1
        counts = routers.counts()
        biases.append(routers.moved(biases[-1], counts))
        routers.reset()
        share = 1.0 if case.per_token else 1.0 / original.d
        gradients = {name: sum(sums[name] * share for sums in replicas) for name in masters}
        tokens = sum(count for _, count in losses)
        scale = batch_scale * (tokens if case.per_token else 1.0)
        norm = math.sqrt(sum(float(g.norm().double() ** 2) for g in gradients.values())) / scale
        overflow = case.dtype == "float16" and not math.isfinite(norm)
        mean = sum(total for total, _ in losses) / tokens
        results.append({"loss": mean, "norm": norm, "overflow": overflow, "scale": batch_scale, "tokens": counts})
        results[-1]["further"] = means(further)
        if waiting is not None:
            apply(batch - 1, *waiting)
            tokens_of_each = waiting[2]
        waiting = gradients, scale, tokens / count * original.d
        if original.provisional_microbatches == 0:
            before = stepped_from or true
            predicted = [{name: value + (value - before[name]) for name, value in true.items()}] * original.d
            continue
        if original.reduce_partial:
            average = {name: sum(sums[name] * share for sums in partial) for name in masters}
            partial = [average] * original.d
        else:
            partial = [sums | shared_gradients(original, partial, replica) for replica, sums in enumerate(partial)]
        predicted = []
        for sums in partial:
            finite = all(gradient.isfinite().all() for gradient in sums.values())
            unknown = case.per_token and tokens_of_each is None
            if not finite or unknown or (clip is None and case.optimizer != "adam"):
                predicted.append(true)
                continue
            copies = {name: value.clone() for name, value in true.items()}
            stand_in = make_optimizer(case, copies)
            stand_in.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if case.per_token:  # each microbatch is taken to have as many tokens as those of the last batch stepped
                batch_scale = (
                    results[-1]["scale"] * tokens_of_each * own / (1 if original.reduce_partial else original.d)
                )
            shares = {name: own / batch_scale / num_read(original, name, own) for name in copies}
            of_batch = own if original.reduce_partial else count
            read = {name: 1 if original.reduce_partial else num_sharing(original, name) for name in copies}
            parts = {name: num_read(original, name, own) * read[name] / of_batch for name in copies}
            at_least = {name: sums[name] * (share * math.sqrt(parts[name])) for name, share in shares.items()}
            factors = clip_factors(original, at_least, clip)
            for name, each in copies.items():
                each.grad = sums[name] * (shares[name] * factors[name])
            for group in stand_in.param_groups:
                group["lr"] = _learning_rate(case, samples_done)
            stand_in.step()
            predicted.append(_copy(copies))
        predicted = of_holders(original, predicted)
    apply(len(case.batches) - 1, *waiting)
    cast = [
        {name: tensor.to(case.torch_dtype).float() for name, tensor in each.items()} for each in (true, predicted[0])
    ]
    return {"batches": results, "newest": cast[0], "older": cast[1]}


def _copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
