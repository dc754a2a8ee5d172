"""What plain torch makes of a run that freezes layers, in one process: none of the project's runtime, its optimizers or
its transition.

What is frozen asks for no gradient and is in eval mode. One AdamW or SGD owns all FP32 masters from beginning to end;
what is frozen has no gradient there, so it leaves them and their moments alone. Where validation falls and all layers
train again, the moments of all are set to zero and counters to 0, and masters of what was frozen to the weights. Under
2bw a batch is computed with the weights of one batch before, and what is frozen with the newest, from the batch after
the decision on.
"""

import argparse
import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tests.pipeline.runtime.stages.megatron.megatron_model import Case
from tests.pipeline.runtime.stages.megatron.megatron_reference import LossScale, make_optimizer
from tests.trainer.run.run_case import BASE, numbered_names, training_program


def reference(flags: str, *, program: str = "pretrain_gpt", base: str = BASE, replicas: int = 1) -> dict:
    """By batch losses, norms (of layers, too), the layers that are frozen and the validation loss behind it; weights
    and moments at the end.

    `flags`: without degrees. `replicas`: in how many sums the microbatches of a batch are added up first.
    """
    from megatron.trainer.arguments import parse_args
    from megatron.trainer.data.microbatches import MicrobatchIterator
    from megatron.trainer.data.tokenizer import build_tokenizer, padded_vocab_size, vocab_size
    from megatron.trainer.models import core_config
    from megatron.trainer.models.gpt import build_chunks
    from megatron.trainer.run.pretraining import complete
    from megatron.trainer.start_up import initialize

    defaults, trained = training_program(program)
    args, _ = complete(parse_args(f"{base} {flags}".split(), defaults=defaults))
    args = initialize.set_up(args)
    tokenizer = build_tokenizer(args)
    args = replace(args, padded_vocab_size=padded_vocab_size(args, tokenizer))
    datasets, fields = trained.datasets_provider(args, tokenizer).parts, trained.fields_provider(args)

    def data(index: int, name: str):
        return MicrobatchIterator(
            args, datasets[index], fields=fields, name=name, consumed_samples=0,
            vocab_size=vocab_size(args, tokenizer), repeats=index > 0,
        )  # fmt: skip

    model_config = core_config.transformer_config(args)
    [module] = build_chunks(partial(trained.model_provider, args), model_config)
    training = _Training(args, module, trained.forward_step, data(0, "training"), replicas)
    validation = None
    while len(training.batches) < args.train_iters:
        training.batch()
        iteration = len(training.batches)
        if args.eval_iters and iteration % args.eval_interval == 0:
            validation = validation or data(1, "validation")
            training.batches[-1]["validation"] = training.evaluate(validation)
            training.watch(training.batches[-1])
    return training.result()


class _Training:
    def __init__(self, args: argparse.Namespace, module: torch.nn.Module, step, data, replicas: int) -> None:
        from megatron.core.utils import unwrap_model
        from megatron.pipeline.runtime.stages.megatron.data_and_dropout import SeededDropout

        self.args, self.module, self.step, self.data, self.replicas = args, module, step, data, replicas
        self.model = unwrap_model(module)
        self.dropout = SeededDropout(self.model, seed=args.seed)
        self.names = dict(numbered_names(self.model))
        self.masters = {name: each.detach().clone().float() for name, each in self.names.items()}
        dtype = "float16" if args.fp16 else "bfloat16" if args.bf16 else "float32"
        case = Case(optimizer=args.optimizer, lr=args.lr, weight_decay=args.weight_decay, adam_eps=args.adam_eps,
                    dtype=dtype, loss_scale=args.loss_scale, initial_loss_scale=args.initial_loss_scale)  # fmt: skip
        self.optimizer = make_optimizer(case, self.masters)
        self.delay = int(args.pipeline_schedule == "2bw")
        self.scales = LossScale(case, self.delay + 1)
        self.checks_overflow = args.fp16
        self.versions = [self._copies()]
        self.num_frozen, self.samples, self.microbatches = 0, 0, 0
        self.bound, self.interval, self.num_intervals = 0.0, [], 0
        self.best, self.has_ended = math.inf, False
        self.batches: list[dict] = []

    def _copies(self) -> dict[str, Tensor]:
        return {name: master.clone() for name, master in self.masters.items()}

    def _layer(self, name: str) -> int | None:
        """The layer of a parameter, from 1; 0 the embedding; None: behind the layers."""
        words = name.split(".")
        if "layers" in words:
            return int(words[words.index("layers") + 1])
        return 0 if words[0] == "embedding" else None

    def _is_frozen(self, name: str) -> bool:
        layer = self._layer(name)
        return self.num_frozen > 0 and layer is not None and layer <= self.num_frozen

    @torch.no_grad()
    def _show(self, delay: int) -> None:
        used = self.versions[max(len(self.versions) - 1 - delay, 0)]
        for name, parameter in self.names.items():
            parameter.copy_(self.versions[-1][name] if self._is_frozen(name) else used[name])

    def _forward(self, data) -> tuple:
        with self.dropout.microbatch(self.microbatches * self.args.micro_batch_size):
            output, loss_function = self.step(data, self.module)
            return loss_function(output)

    def batch(self) -> None:
        args, count = self.args, self.args.batch_sizes.num_microbatches(self.samples)
        scale = self.scales.of_batch(len(self.batches))
        self._show(self.delay)
        self._set_modes()
        replicas: list[dict] = [{} for _ in range(self.replicas)]
        losses = []
        for position in range(count):
            with self.dropout.microbatch(self.microbatches * args.micro_batch_size):
                output, loss_function = self.step(self.data, self.module)
                loss, numbers = _mean(loss_function(output))
                losses.append(numbers)
                (loss / (count // self.replicas)).backward(torch.tensor(scale))
            sums = replicas[position % self.replicas]
            for name, parameter in self.names.items():
                if parameter.grad is not None:
                    gradient = parameter.grad.float()
                    sums[name] = sums[name] + gradient if name in sums else gradient.clone()
                    parameter.grad = None
            self.microbatches += 1
        gradients = {name: sum(each[name] * (1.0 / self.replicas) for each in replicas) for name in replicas[0]}
        assert not any(map(self._is_frozen, gradients))
        self.samples += count * args.micro_batch_size
        squares = {name: float(gradient.norm().double() ** 2) for name, gradient in gradients.items()}
        norm = math.sqrt(sum(squares.values())) / scale
        overflow = self.checks_overflow and not math.isfinite(norm)
        if not overflow:
            self._step(gradients, norm, scale)
        self.scales.step(scale, overflow=overflow)
        self.versions.append(self._copies())
        layers = [sum(each for name, each in squares.items() if self._layer(name) == layer) / scale**2
                  for layer in range(1, args.num_layers + 1)]  # fmt: skip
        self.batches.append({"losses": {name: sum(each[name] for each in losses) / count for name in losses[0]},
                             "norm": norm, "layers": layers, "num_frozen": self.num_frozen, "scale": scale,
                             "overflow": overflow})  # fmt: skip
        self._decide(layers, overflow)

    def _step(self, gradients: dict[str, Tensor], norm: float, scale: float) -> None:
        coefficient, clip = 1.0 / scale, self.args.clip_grad
        by = self.batches[-1]["norm"] if self.args.pipeline_2bw_single_gradient_buffer and self.batches else norm
        if clip > 0 and clip / (by + 1e-6) < 1:
            coefficient *= clip / (by + 1e-6)
        for name, master in self.masters.items():
            master.grad = gradients[name] * coefficient if name in gradients else None
        self.optimizer.step()

    def _decide(self, layers: list[float], overflow: bool) -> None:
        """The paper's rule, or the counts that are given, at the end of an interval."""
        args, batch = self.args, len(self.batches)
        if batch > args.freeze_start and not overflow:
            self.interval.append(layers)
        if (
            self.has_ended
            or not args.freeze_training
            or batch <= args.freeze_start
            or (batch - args.freeze_start) % args.freeze_interval
        ):
            return
        means = [sum(each) / len(self.interval) for each in zip(*self.interval, strict=True)]
        self.interval = []
        self.num_intervals += 1
        if args.freeze_schedule is not None:
            counts = [int(each) for each in args.freeze_schedule.split(",")]
            self.num_frozen = counts[min(self.num_intervals, len(counts)) - 1]
        elif means:
            least = min(range(self.num_frozen, args.num_layers), key=lambda layer: means[layer])
            most = self.bound + args.freeze_alpha * (args.num_layers - self.bound)
            self.bound = max(self.bound, min(most, least))
            self.num_frozen = math.floor(self.bound)

    @torch.no_grad()
    def watch(self, batch: dict) -> None:
        """All layers train again where an evaluation is worse than the best by more than is allowed."""
        loss, tolerance, frozen = batch["validation"], self.args.freeze_watch_validation, batch["num_frozen"]
        if tolerance is not None and frozen and not self.has_ended and loss > self.best * (1 + tolerance):
            self.num_frozen, self.has_ended = frozen, True
            for name, master in self.masters.items():
                if self._is_frozen(name):
                    master.copy_(master.to(self.names[name].dtype))
                for value in self.optimizer.state[master].values():
                    if isinstance(value, Tensor):
                        value.zero_()
            self.num_frozen = 0
        self.best = min(self.best, loss)

    def _set_modes(self) -> None:
        stack = self.model.encoder if hasattr(self.model, "encoder") else self.model.decoder
        self.module.train()
        for module in (self.model.embedding, *stack.layers[: self.num_frozen]) if self.num_frozen else ():
            module.eval()
        for name, parameter in self.names.items():
            parameter.requires_grad_(not self._is_frozen(name))

    @torch.no_grad()
    def evaluate(self, data) -> float:
        args = self.args
        self._show(0)
        self.module.eval()
        found = [_mean(self._forward(data))[1]["lm loss"]
                 for _ in range(args.eval_iters * args.global_batch_size // args.micro_batch_size)]  # fmt: skip
        return sum(found) / len(found)

    def result(self) -> dict:
        dtype = next(iter(self.names.values())).dtype
        state = {name: {key: value.clone() if isinstance(value, Tensor) else value
                        for key, value in self.optimizer.state[master].items()}
                 for name, master in self.masters.items()}  # fmt: skip
        return {"batches": self.batches, "moments": state,
                "weights": {name: master.to(dtype) for name, master in self.masters.items()}}  # fmt: skip


def _mean(result: tuple) -> tuple[Tensor, dict[str, float]]:
    """The loss to differentiate, and the reported numbers, each a mean, or a sum and a count."""
    *loss, numbers = result
    values = {name: value.detach().reshape(-1) for name, value in numbers.items()}
    means = {name: float(each[0] / each[1] if len(each) == 2 else each[0]) for name, each in values.items()}
    return loss[0] / loss[1] if len(loss) == 2 else loss[0], means
