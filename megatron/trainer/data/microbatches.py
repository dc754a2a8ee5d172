"""The microbatches of a stage, made from a dataset.

Samples are read in order, from an absolute position: sample number `consumed + k x (microbatch size x data parallel
size) + data rank x microbatch size` starts microbatch k of a data parallel rank. So a resumed run, a ramp-up of the
batch size and any schedule read the same samples. A model's `Field`s say which parts of a sample a stage needs. If a
stage needs data, only its first tensor parallel rank reads them and broadcasts them to its tensor parallel group. Ranks
that share sequences (context parallelism) read the same samples, and each keeps its own tokens. If a rank has several
stages, each stage has its own iterator.
"""

import atexit
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megatron import backend
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.pipeline.program.copies import Share
from megatron.pipeline.runtime.failure.errors import name_cut_files
from megatron.pipeline.start_up.core_version import installed_core
from megatron.processes import end_with_parent
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.arguments.rules.stages import stage_of_further_layers


@dataclass(frozen=True, kw_only=True)
class Field:
    """A tensor of a microbatch, named as in the dataset's samples.

    Attributes:
        stages: the stages that need the tensor: "first", "last" or "all".
        also: a further stage that needs it, counted from the end: -1 is the last one.
        shape: (microbatch size, sequence length) -> shape of the tensor.
        least_id: the smallest allowed token id; None if the tensor has no token ids.
        stays_on_host: the host reads the values, so the tensor stays there. With tensor parallelism it is broadcast all
            the same, and the host waits for the device.
    """

    name: str
    stages: str = "all"
    also: int | None = None
    shape: Callable[[int, int], tuple[int, ...]] = lambda size, length: (size, length)
    dtype: torch.dtype = torch.int64
    least_id: int | None = None
    stays_on_host: bool = False

    def is_needed(self, stage: int, num_stages: int) -> bool:
        """Whether a stage of the pipeline needs the tensor."""
        return (
            self.stages == "all"
            or (self.stages == "first" and stage == 0)
            or (self.stages == "last" and stage == num_stages - 1)
            or (self.also is not None and stage == num_stages + self.also)
        )


FieldsProvider = Callable[[TrainConfig], tuple[Field, ...]]


def gpt_fields(args: TrainConfig) -> tuple[Field, ...]:
    """The fields that a GPT's stages need for b samples of s tokens.

    These are `tokens`, `position_ids` and `labels` (int64 [b, s]), `loss_mask` (float32 [b, s]), with
    `--reset-attention-mask` also `attention_mask` (bool [b, 1, s, s], True for a masked position), and with `--sft`
    `cu_seqlens` (int32 [b, s + 1]: the first token of each conversation, padded with s).
    """
    further = stage_of_further_layers(args)
    fields = (
        Field(name="tokens", stages="first", also=further, least_id=0),
        Field(name="position_ids", stages="first", also=further),
        Field(name="labels", stages="last", least_id=0),
        Field(name="loss_mask", stages="last", dtype=torch.float32),
    )
    if args.sft:
        borders = Field(
            name="cu_seqlens", shape=lambda size, length: (size, length + 1), dtype=torch.int32, stays_on_host=True
        )
        return (*fields, borders)
    if not args.reset_attention_mask:
        return fields
    return (
        *fields,
        Field(name="attention_mask", shape=lambda size, length: (size, 1, length, length), dtype=torch.bool),
    )


@dataclass(frozen=True, kw_only=True)
class MicrobatchSampler:
    """A sampler that yields the sample numbers of the microbatches of one replica, or of one copy of a stage.

    Attributes:
        num_samples: length of the dataset.
        consumed_samples: number of samples consumed before, over all replicas.
        micro_batch_size: samples of a microbatch.
        num_replicas: the number of replicas of the job while no rank is lost. One microbatch of each makes a round, and
            the data end with a whole round.
        share: the positions in a batch of the microbatches that the sampler yields.
        repeats: start over at the end of the dataset, endlessly.
    """

    num_samples: int
    consumed_samples: int
    micro_batch_size: int
    num_replicas: int
    share: Share
    repeats: bool = False

    def __iter__(self) -> Iterator[list[int]]:
        size, end, stride = self.micro_batch_size, self.num_samples, self.micro_batch_size * self.num_replicas
        start = self.consumed_samples
        if self.repeats:
            start %= end // stride * stride
        position = 0
        while start + stride <= end:
            for first in range(start, start + stride, size):
                if self.share.takes(position):
                    yield list(range(first, first + size))
                position += 1
            start += stride
            if self.repeats and start + stride > end:
                start = 0


def _start_worker(_: int) -> None:
    """Prepare a worker process that loads samples: it ignores SIGINT, and ends when its parent ends.

    A bus error is reported with the name of the truncated file; torch would report a lack of shared memory.
    """
    name_cut_files()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(by=signal.SIGKILL)  # torch's own check for the parent takes seconds


class MicrobatchIterator:
    """An iterator over the microbatches of a dataset for one stage of this rank.

    It yields dictionaries of tensors with the fields that the stage needs; {} if it needs none. The tensors are on the
    device, except for fields that stay on the host. With context parallelism a field has only this rank's tokens, and
    an attention mask only the rows of these tokens.

    Args:
        dataset: the dataset; None on ranks that do not read.
        fields: the fields of a microbatch.
        name: name of the data in errors.
        consumed_samples: number of samples to skip.
        vocab_size: a token id of at least this number raises ValueError.
        stage, num_stages: the stage, and the number of stages.
        repeats: start over at the end of the dataset; otherwise its end raises ValueError.
        share: the microbatches of a batch that a copy of a stage takes; None: those of its replica.
    """

    def __init__(
        self,
        args: TrainConfig,
        dataset,
        *,
        fields: tuple[Field, ...],
        name: str,
        consumed_samples: int,
        vocab_size: int,
        stage: int = 0,
        num_stages: int = 1,
        repeats: bool = False,
        share: Share | None = None,
    ) -> None:
        self._taken, self._num_read, self._consumed = share, 0, consumed_samples
        self.args, self.name, self.vocab_size = args, name, vocab_size
        self.next_sample = self._sample_of(0)
        self.fields = [field for field in fields if field.is_needed(stage, num_stages)]
        self.tensor_group = parallel_state.get_tensor_model_parallel_group()
        self.source = parallel_state.get_tensor_model_parallel_src_rank()
        self.reads = bool(self.fields) and parallel_state.get_tensor_model_parallel_rank() == 0
        self.loader = self._start(dataset, repeats) if self.reads else None

    def _start(self, dataset, repeats: bool) -> Iterator[dict[str, torch.Tensor]]:
        """Start the processes that load samples.

        They inherit a blocked SIGTERM: a launcher sends SIGTERM to whole process groups, and it is a stop request to
        the parent only. `close` ends the processes, at the latest when the interpreter exits.
        """
        loader = self._loader(dataset, repeats)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            return iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            atexit.register(self.close)  # runs before multiprocessing's exit handler, which would send SIGTERM and wait

    def _loader(self, dataset, repeats: bool) -> torch.utils.data.DataLoader:
        replicas = self.args.data_parallel_size
        sampler = MicrobatchSampler(
            num_samples=len(dataset), consumed_samples=self._consumed, micro_batch_size=self.args.micro_batch_size,
            num_replicas=replicas, repeats=repeats,
            share=self._taken or Share((parallel_state.get_data_parallel_rank(),), replicas),
        )  # fmt: skip
        return torch.utils.data.DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=self.args.num_workers,
            pin_memory=backend.is_cuda(),
            persistent_workers=self.args.num_workers > 0,
            worker_init_fn=_start_worker,
            generator=torch.Generator(),  # the loader must not draw its seed from the generator of dropout
        )

    def __iter__(self) -> "MicrobatchIterator":
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        batch = self._read() if self.reads else None
        self._num_read += 1
        first, self.next_sample = self.next_sample, self._sample_of(self._num_read)
        if batch is not None:
            self._check(batch, first)
        shared = {field.name: self._share(field, batch) for field in self.fields}
        if parallel_state.get_context_parallel_world_size() == 1:
            return shared
        group = parallel_state.get_context_parallel_group()
        return get_batch_on_this_cp_rank(shared, cp_group=group, **installed_core().whole_sequences)

    def _sample_of(self, number: int) -> int:
        """The number of the first sample that all replicas together read for the stage's microbatch `number`."""
        replicas = number * self.args.data_parallel_size
        position = replicas if self._taken is None else self._taken.position_of(number)
        return self._consumed + position * self.args.micro_batch_size

    def close(self) -> None:
        """End the processes that load samples; torch would report an error if they were killed at the exit."""
        loader, self.loader = self.loader, None
        atexit.unregister(self.close)
        if isinstance(loader, torch.utils.data.dataloader._MultiProcessingDataLoaderIter):
            loader._shutdown_workers()  # a traceback may refer to the loader and delay its end
            for worker in loader._workers:
                if worker.is_alive():  # it hangs in a read
                    worker.kill()

    def _read(self) -> dict[str, torch.Tensor]:
        try:
            return next(self.loader)
        except StopIteration:
            raise ValueError(
                f"the {self.name} data ends at sample {self.next_sample}; give more data or shorten the run"
            ) from None
        except ValueError as error:  # torch adds the worker's traceback to the text
            raise ValueError(str(error).strip().rpartition("ValueError: ")[2]) from error

    def _check(self, batch: dict[str, torch.Tensor], first: int) -> None:
        for field in self.fields:
            if field.least_id is not None:
                smallest, largest = batch[field.name].min().item(), batch[field.name].max().item()
                if smallest < field.least_id or largest >= self.vocab_size:
                    wrong = smallest if smallest < field.least_id else largest
                    raise ValueError(
                        f"token id {wrong} in the {self.name} data (samples from {first}) is beyond the "
                        f"vocabulary of {self.vocab_size}; use the tokenizer that the data was made with"
                    )

    def _share(self, field: Field, batch: dict[str, torch.Tensor] | None) -> torch.Tensor:
        device = backend.device()
        if field.stays_on_host and self.args.tensor_model_parallel_size == 1:
            return batch[field.name].to(field.dtype)
        if batch is not None:
            # Two steps: in one, torch would convert on the host, into unpinned memory, and wait for the device.
            tensor = batch[field.name].to(device, non_blocking=True).to(field.dtype)
        else:
            shape = field.shape(self.args.micro_batch_size, self.args.seq_length)
            tensor = torch.empty(shape, dtype=field.dtype, device=device)
        if self.args.tensor_model_parallel_size > 1:
            torch.distributed.broadcast(tensor, self.source, group=self.tensor_group)
        return tensor


def gpt_inputs(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """(tokens, labels, loss_mask, attention_mask, position_ids) of a microbatch; None for those that a stage lacks."""
    return tuple(batch.get(key) for key in ("tokens", "labels", "loss_mask", "attention_mask", "position_ids"))


def language_model_loss(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Megatron's loss function of a language model.

    Args:
        loss_mask: float32 [b, s], 0 for a token without a loss.
        output: cross entropy of each token, [b, s].

    Returns (sum of losses, number of tokens, {"lm loss": tensor [sum, tokens]}); the tensor is detached, for the log.
    """
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(output.reshape(-1).float() * mask)
    num_tokens = mask.sum().to(torch.int)
    report = torch.stack([total.detach().clone(), num_tokens.to(total.dtype)])
    return total, num_tokens, {"lm loss": report}
