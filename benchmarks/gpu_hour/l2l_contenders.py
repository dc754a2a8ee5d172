"""Who trains in `l2l`: flush and l2l as pretrain_gpt.py builds them, and torch's FSDP2 around the same GPT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_hour.trained import RECOMPUTE, RandomTokens, Size, TrainingRun, configured
from megatron import backend
from papers.l2l.peers import FullyShard

RELAY = ("--pipeline-schedule", "l2l", "--l2l-stash", "host", "--optimizer-kernel", "fused")
FLUSH, L2L, FSDP2, FSDP2_AT_ONCE = "flush", "l2l", "FSDP2", "FSDP2, one microbatch"
NAMES = (FLUSH, L2L, FSDP2, FSDP2_AT_ONCE)
LEARNING_RATE, BETAS, EPSILON = 1e-4, (0.9, 0.999), 1e-8  # the defaults of pretrain_gpt.py's Adam, and FLAGS' rate


class Run:
    """A contender that pretrain_gpt.py would train."""

    def __init__(self, size: Size, store: Any, flags: Sequence[str]) -> None:
        self._run = TrainingRun(size.argv(*flags), store)
        self.engine, self.update = self._run.run.engine, self._run.run.update

    def train(self, num_batches: int) -> list[float]:
        """Train batches to their end, with all updates. Returns their losses."""
        losses = [loss for _ in range(num_batches) for loss in self._run.batch()]
        return losses + self._run.drain()

    def close(self) -> None:
        self._run.close()


class ShardedGPT:
    """The GPT of pretrain_gpt.py for FSDP2: FP32 weights, which begin at BF16 values and are gathered in BF16."""

    def __init__(self, size: Size, store: Any) -> None:
        self._size, self._args = size, configured(size.argv(), store)
        self.microbatch_size = size.micro_batch
        self.layer_parameters = 0
        self._samples = RandomTokens(size.sequence, size.vocabulary - 1)

    def recomputed(self, wrap: Callable[[nn.Module], nn.Module] = lambda unit: unit) -> nn.Module:
        from megatron.trainer.data.tokenizer import build_tokenizer, padded_vocab_size
        from megatron.trainer.models.gpt import build_chunks
        from megatron.trainer.plan.arrangement import model_config
        from megatron.trainer.profile.pool import training_program

        args = self._args
        args = replace(args, padded_vocab_size=padded_vocab_size(args, build_tokenizer(args)))
        [chunk] = build_chunks(partial(training_program("gpt").model_provider, args), model_config(args))
        model = chunk.module.float()  # without the wrapper that casts to BF16, which FSDP2 does
        for layer in model.decoder.layers:
            self.layer_parameters = sum(each.numel() for each in layer.parameters())
            layer.forward = partial(
                torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )
            wrap(layer)
        return wrap(model)

    @cached_property
    def _positions(self) -> Tensor:
        return torch.arange(self._size.sequence, device=backend.device()).expand(self.microbatch_size, -1)

    def loss(self, module: nn.Module, microbatch: int) -> Tensor:
        first = microbatch * self.microbatch_size
        samples = [self._samples[first + each] for each in range(self.microbatch_size)]
        tokens, labels = (torch.stack([each[name] for each in samples]).to(backend.device())
                          for name in ("tokens", "labels"))  # fmt: skip
        return module(tokens, self._positions, None, labels=labels).float().mean()

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            module.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=0.0, fused=True
        )


class Sharded:
    """FSDP2 with `CPUOffloadPolicy` as a contender."""

    def __init__(self, size: Size, store: Any) -> None:
        self._peer = FullyShard(ShardedGPT(size, store), param_dtype=torch.bfloat16)
        self._microbatches = size.microbatches

    def train(self, num_batches: int) -> list[float]:
        losses = [self._peer.run(self._microbatches) for _ in range(num_batches)]
        backend.synchronize()
        return losses

    def close(self) -> None:
        del self._peer


def at_once(size: Size) -> Size:
    """The same batch as one microbatch."""
    return replace(size, micro_batch=size.micro_batch * size.microbatches, microbatches=1)


def make(name: str, size: Size, store: Any, *flags: str) -> Run | Sharded:
    """Make a contender. `store`: as for a `TrainingRun`; `flags`: further ones of a run."""
    if name in (FSDP2, FSDP2_AT_ONCE):
        return Sharded(size if name == FSDP2 else at_once(size), store)
    return Run(size, store, (*(RELAY if name == L2L else RECOMPUTE), *flags))
