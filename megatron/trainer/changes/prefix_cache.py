"""AutoCache: a run's cache of the outputs of its frozen layers (PipeTransformer, section 3.4).

The rank with the frozen layers looks up each sample of a microbatch. If all are cached, the cached outputs are the
stage's output. If a sample is missing, the whole microbatch is computed, as without a cache, so that the result has the
same bits. If more layers have frozen since, it is computed from the cached outputs of the previous depth.
"""

import errno
import hashlib
import json
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron import backend
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from megatron.documents import GIB
from megatron.elastic.cache import ActivationCache, Generation, require_usable, weights_digest
from megatron.elastic.cache.folder import FEWEST_BYTES
from megatron.pipeline.runtime.failure.agreement import control_group, gathered
from megatron.pipeline.runtime.stages.megatron.stage import MegatronStage
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.arguments.rules.programs import num_samples
from megatron.trainer.plan.arrangement import model_config

logger = logging.getLogger(__name__)

_ABOUT_STAGES = ("pipeline", "timers", "microbatch")


class PrefixCache:
    """The activation cache of one rank for the whole run; its first stage's `OutputCache` while that stage is frozen.

    Args:
        dataset: the training data, with sample ids; None if this rank reads no data.

    Raises:
        ValueError: the dataset does not promise that samples repeat, or has no sample ids.
    """

    def __init__(self, args: TrainConfig, dataset: object | None) -> None:
        if dataset is not None and not (getattr(dataset, "samples_repeat", False) and hasattr(dataset, "sample_id")):
            raise ValueError(
                f"--activation-cache {args.activation_cache}: {type(dataset).__name__} does not say that its samples "
                "come again as they were (`samples_repeat`, `sample_id`), as augmented ones do not; leave the flag out"
            )
        self._args, self._dataset = args, dataset
        self._cache: ActivationCache | None = None
        self._told: Counter[str] = Counter()
        self._unread = 0  # samples to read until each sample has been read at the current depth
        self._depth = 0  # depth of the cached outputs; known on all ranks, since any rank may get the first stage

    def serve(self, args: TrainConfig, stages: list[MegatronStage]) -> None:
        """Attach the cache to the rank's stages; the first stage uses it if it is frozen and the arrangement is cached.

        `args`: the configuration of the run in the current arrangement.
        """
        self._args, arrangement, first = args, args.arrangement, stages[0]
        before, self._depth = self._depth, arrangement.num_frozen if arrangement.cached else 0
        if not (arrangement.cached and first.is_frozen and first.index == 0):
            self.close()
            return
        first.output_cache = self
        generation = self._generation(first, arrangement.num_frozen)
        older = self._generation(first, before) if 0 < before < arrangement.num_frozen else None
        try:
            if self._cache is None:
                self._cache = ActivationCache(
                    Path(self._args.activation_cache), generation, older=older, most_bytes=_limit(self._args)
                )
            elif self._cache.generation != generation:
                self._cache.deepen(generation)
            self._unread = 2 * num_samples(self._args, "train")  # contains a whole epoch, wherever it starts
        except (OSError, ValueError) as error:
            logger.warning("--activation-cache: rank %d goes on without: %s", self._args.rank, error)
            self.close()

    def _generation(self, stage: MegatronStage, depth: int) -> Generation:
        args, spec = self._args, stage.output_spec
        model = unwrap_model(stage.model)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return Generation(
            weights=weights_digest((name, tensor) for name, tensor in tensors if _layer(name) < depth),
            depth=depth,
            dtype=spec.dtype,
            shape=(spec.shape[0], *spec.shape[2:]),
            tensor_ranks=args.tensor_model_parallel_size,
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            microbatch_rows=args.micro_batch_size,
            padding=f"to {args.seq_length}",
            threads=torch.get_num_threads(),
            kernels=f"{args.transformer_impl} {args.attention_backend} {_device()} {digest_of_config(args)}",
            data=f"{args.architecture} {args.data_digest}",
        )

    def read(self, batch: dict[str, Tensor]) -> Tensor | None:
        """The cached output of a microbatch, as `OutputCache.read` returns it.

        If one tensor rank lacks a part of the microbatch, all tensor ranks compute the microbatch, since they compute
        together.
        """
        self._forget_older(self._args.micro_batch_size * self._args.data_parallel_size)
        return self._joined([None] if self._cache is None else self._cache.get(_numbers(batch)))

    def read_older(self, batch: dict[str, Tensor]) -> tuple[Tensor, int] | None:
        """The cached output of the previous depth, as `OutputCache.read_older` returns it.

        None with FP32 residual connections: between two layers the residual is wider than between two stages.
        """
        older = None if self._cache is None or self._args.fp32_residual_connection else self._cache.older
        hidden = self._joined([None] if older is None else self._cache.get_older(_numbers(batch)))
        return None if hidden is None else (hidden, older.depth)

    def _joined(self, found: list[Tensor | None]) -> Tensor | None:
        """The samples as a microbatch on the device; None unless all tensor ranks have all its samples."""
        has_all = all(each is not None for each in found)
        if self._args.tensor_model_parallel_size > 1:
            have_all = torch.tensor([int(has_all)], device=backend.device())
            group = parallel_state.get_tensor_model_parallel_group()
            dist.all_reduce(have_all, op=dist.ReduceOp.MIN, group=group)
            has_all = bool(have_all.item())
        return torch.stack(found, dim=1).to(backend.device(), non_blocking=True) if has_all else None

    def _forget_older(self, num_read: int) -> None:
        """Drop the outputs of the previous depth once each sample has been read at the current depth."""
        if self._unread > 0 >= self._unread - num_read and self._cache is not None:
            self._cache.forget_older()
        self._unread -= num_read

    def write(self, batch: dict[str, Tensor], output: Tensor) -> None:
        """Cache the output of a microbatch, as `OutputCache.write` describes."""
        if self._cache is not None:
            self._cache.put(_numbers(batch), output.unbind(dim=1))

    def read_ahead(self, data: Iterator) -> None:
        """Start to read the outputs of the next microbatch of `data`, as `OutputCache.read_ahead` describes."""
        if self._dataset is None or self._cache is None:
            return
        size = self._args.micro_batch_size
        begin = data.next_sample + size * parallel_state.get_data_parallel_rank()
        if begin + size <= len(self._dataset):
            self._cache.prefetch([self._dataset.sample_id(index) for index in range(begin, begin + size)])

    def seconds(self) -> tuple[float, float] | None:
        """The seconds to read and to write a sample on the slowest rank; None if no rank has measured both.

        Collective: every rank must call it.
        """
        own = None if self._cache is None else self._cache.measured
        found = gathered(own and (own.read_seconds, own.write_seconds), control_group())
        known = [each for each in found if each is not None and None not in each]
        if not known:
            return None
        return max(read for read, _ in known), max(write for _, write in known)

    def describe(self) -> str:
        """A line with the counts of all ranks since the last call; empty if no rank has a cache.

        Collective: every rank must call it.
        """
        own = None if self._cache is None else self._take_counts()
        found = [each for each in gathered(own, control_group()) if each is not None]
        if not found:
            return ""
        total = sum(found, Counter())
        return (
            f"activation cache: {total['hits']} samples read ({total['prefetched']} ahead), {total['misses']} not "
            f"found ({total['older_hits']} at the depth before), {total['written']} written, "
            f"{total['not_written']} not written, {total['damaged']} damaged; "
            f"{total['bytes_read'] / 2**20:.1f} MiB read"
        )

    def _take_counts(self) -> Counter[str]:
        self._cache.flush()
        before, self._told = self._told, self._cache.measured.counts
        return self._told - before

    def close(self) -> None:
        """Write pending outputs, and close the files."""
        if self._cache is not None:
            self._cache.close()
            self._cache, self._told = None, Counter()


def require_cache(args: TrainConfig) -> None:
    """Check that --activation-cache can be used on this node. Raises ValueError if not."""
    try:
        require_usable(Path(args.activation_cache), most_bytes=_limit(args))
    except ValueError as error:
        holds_nothing = _limit(args) < FEWEST_BYTES
        flag = f"--activation-cache-gib {args.activation_cache_gib:g}" if holds_nothing else "--activation-cache"
        raise ValueError(f"{flag}: {error}") from error


def missing_cache(args: TrainConfig) -> list[str]:
    """A note if the folder of --activation-cache does not exist on this machine; creates no file that stays.

    Raises ValueError, as `require_cache` does, for a folder that would be refused on any machine.
    """
    if _limit(args) < FEWEST_BYTES:
        require_cache(args)  # refuses the size before it checks the folder
    folder = Path(args.activation_cache).absolute()
    there = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    try:
        if there == folder and not folder.is_dir():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EROFS) and there not in (folder, folder.parent):
            return [f"--activation-cache {folder} is not on this machine"]
        raise ValueError(
            f"--activation-cache: {folder} cannot be the folder of a cache ({error.strerror}); name one that can be "
            "written"
        ) from error
    return []


def digest_of_config(args: TrainConfig) -> str:
    """A digest of megatron.core's configuration of the model, without the fields about the split into stages."""
    said = {}
    for each in fields(model_config(args)):
        value = getattr(model_config(args), each.name)
        if not any(word in each.name for word in _ABOUT_STAGES):
            is_plain = isinstance(value, bool | int | float | str | list | tuple | dict | torch.dtype | Enum | None)
            said[each.name] = str(value) if is_plain else getattr(value, "__qualname__", type(value).__qualname__)
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def _limit(args: TrainConfig) -> int:
    return int(args.activation_cache_gib * GIB)


def _device() -> str:
    if not backend.is_cuda():
        return backend.device().type
    return f"{torch.cuda.get_device_name()} CUDA {torch.version.cuda} cuDNN {torch.backends.cudnn.version()}"


def _layer(name: str) -> int:
    """The number of the layer, from 0, in the name of a tensor; -1 for a tensor before the first layer."""
    words = name.split(".")
    return int(words[words.index("layers") + 1]) if "layers" in words else -1


def _numbers(batch: dict[str, Tensor]) -> list[int]:
    return batch["sample_id"].tolist()
