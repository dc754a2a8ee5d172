"""From datasets to the microbatches that a stage computes on.

Samples are read in order, from an absolute position: sample number `consumed + k x (microbatch size x data parallel
size) + data rank x microbatch size` starts microbatch k of a data parallel rank. So a resumed run, a ramp-up of the
batch size and any schedule see the same samples. Which parts of a sample a stage needs is said by `Field`s, which a
model brings along. Only the first tensor parallel rank of a stage that needs some reads; it broadcasts to its tensor
group. Where a rank has several stages, each has an iterator of its own.
"""

import atexit
import ctypes
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megatron import backend
from megatron.core import parallel_state
from megatron.pipeline.runtime.failure.errors import name_cut_files
from megatron.trainer.arguments.flags.config import TrainConfig

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


@dataclass(frozen=True, kw_only=True)
class Field:
    """One tensor of a microbatch, under the dataset's name for it.

    stages: which stages need it: "first", "last" or "all".
    shape: from microbatch size and sequence length.
    least_id: if it holds token ids, the smallest that may occur.
    is_full: no element may be 0.
    """

    name: str
    stages: str = "all"
    shape: Callable[[int, int], tuple[int, ...]] = lambda size, length: (size, length)
    dtype: torch.dtype = torch.int64
    least_id: int | None = None
    is_full: bool = False

    def is_needed(self, stage: int, num_stages: int) -> bool:
        """Whether a stage of the pipeline needs it."""
        return (
            self.stages == "all"
            or (self.stages == "first" and stage == 0)
            or (self.stages == "last" and stage == num_stages - 1)
        )


FieldsProvider = Callable[[TrainConfig], tuple[Field, ...]]


def gpt_fields(args: TrainConfig) -> tuple[Field, ...]:
    """What a GPT's stages need, with b samples of s tokens: `tokens`, `position_ids` and `labels` (int64 [b, s]),
    `loss_mask` (float32 [b, s]), with `--reset-attention-mask` `attention_mask` (bool [b, 1, s, s], True where
    masked)."""
    fields = (
        Field(name="tokens", stages="first", least_id=0),
        Field(name="position_ids", stages="first"),
        Field(name="labels", stages="last", least_id=0),
        # where every token counts, the mean over microbatches is that over tokens
        Field(name="loss_mask", stages="last", dtype=torch.float32, is_full=args.calculate_per_token_loss),
    )
    if not args.reset_attention_mask:
        return fields
    return (
        *fields,
        Field(name="attention_mask", shape=lambda size, length: (size, 1, length, length), dtype=torch.bool),
    )


class SequentialSampler:
    """Yields the sample numbers of one data parallel rank's microbatches, from `consumed_samples` on.

    Args:
        num_samples: length of the dataset.
        consumed_samples: samples that were taken before, over all replicas.
        micro_batch_size: samples in a microbatch.
        data_parallel_rank, data_parallel_size: this replica and how many there are.
        repeats: begin again where the dataset ends, and go on for ever.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        repeats: bool = False,
    ) -> None:
        self.num_samples, self.consumed_samples = num_samples, consumed_samples
        self.micro_batch_size = micro_batch_size
        self.stride = micro_batch_size * data_parallel_size
        self.offset = micro_batch_size * data_parallel_rank
        self.repeats = repeats

    def __iter__(self) -> Iterator[list[int]]:
        start, end = self.consumed_samples, self.num_samples
        if self.repeats:
            start %= end // self.stride * self.stride
        while start + self.stride <= end:
            first = start + self.offset
            yield list(range(first, first + self.micro_batch_size))
            start += self.stride
            if self.repeats and start + self.stride > end:
                start = 0


def _start_worker(_: int) -> None:
    """A loading process leaves SIGINT to its parent, and goes when the parent is gone. Of a bus error torch would say
    that shared memory is short."""
    name_cut_files()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":  # elsewhere torch's own watch over the parent takes seconds
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class MicrobatchIterator:
    """Microbatches of one dataset for one stage of this rank, as dictionaries of tensors on the device: the fields that
    the stage needs, {} where it needs none.

    Args:
        dataset: None on ranks that do not read.
        fields: the parts of a microbatch.
        name: how errors call the data.
        consumed_samples: where to start.
        vocab_size: ids at or beyond it raise ValueError.
        stage, num_stages: which stage, and of how many.
        repeats: begin again where the dataset ends; otherwise its end raises ValueError.
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
    ) -> None:
        self.args, self.name, self.vocab_size = args, name, vocab_size
        self.next_sample = consumed_samples
        self.fields = [field for field in fields if field.is_needed(stage, num_stages)]
        self.tensor_group = parallel_state.get_tensor_model_parallel_group()
        self.source = parallel_state.get_tensor_model_parallel_src_rank()
        self.reads = bool(self.fields) and parallel_state.get_tensor_model_parallel_rank() == 0
        self.loader = self._start(dataset, repeats) if self.reads else None

    def _start(self, dataset, repeats: bool) -> Iterator[dict[str, torch.Tensor]]:
        """Start loading. SIGTERM, which a launcher sends to whole process groups, is a stop request to the parent only,
        so the loading processes inherit it blocked; they end with `close`, at the latest when the interpreter exits."""
        loader = self._loader(dataset, repeats)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            return iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            atexit.register(self.close)  # before multiprocessing's own exit, which would send them SIGTERM and wait

    def _loader(self, dataset, repeats: bool) -> torch.utils.data.DataLoader:
        sampler = SequentialSampler(
            num_samples=len(dataset),
            consumed_samples=self.next_sample,
            micro_batch_size=self.args.micro_batch_size,
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
            data_parallel_size=self.args.data_parallel_size,
            repeats=repeats,
        )
        return torch.utils.data.DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=self.args.num_workers,
            pin_memory=backend.is_cuda(),
            persistent_workers=self.args.num_workers > 0,
            worker_init_fn=_start_worker,
            generator=torch.Generator(),  # the loader draws a seed; not from the generator that dropout uses
        )

    def __iter__(self) -> "MicrobatchIterator":
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        batch = self._read() if self.reads else None
        first, self.next_sample = (
            self.next_sample,
            self.next_sample + self.args.micro_batch_size * self.args.data_parallel_size,
        )
        if batch is not None:
            self._check(batch, first)
        return {field.name: self._share(field, batch) for field in self.fields}

    def close(self) -> None:
        """End the loading processes, before the interpreter's exit would kill them under torch's eyes."""
        loader, self.loader = self.loader, None
        atexit.unregister(self.close)
        if isinstance(loader, torch.utils.data.dataloader._MultiProcessingDataLoaderIter):
            loader._shutdown_workers()  # references to the loader, as in a traceback, would put off its end
            for worker in loader._workers:
                if worker.is_alive():  # stuck while reading
                    worker.kill()

    def _read(self) -> dict[str, torch.Tensor]:
        try:
            return next(self.loader)
        except StopIteration:
            raise ValueError(
                f"the {self.name} data ends at sample {self.next_sample}; give more data or shorten the run"
            ) from None
        except ValueError as error:  # of a loading process torch tells the whole traceback
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

            if field.is_full and not batch[field.name].all():
                raise ValueError(
                    f"the {self.name} data (samples from {first}) have tokens without a loss, so the mean over "
                    "microbatches, which is trained, is not that over tokens; leave out --calculate-per-token-loss"
                )

    def _share(self, field: Field, batch: dict[str, torch.Tensor] | None) -> torch.Tensor:
        device = backend.device()
        if batch is not None:
            # In two steps: torch would convert on the host, into memory that is not pinned, and wait for the device.
            tensor = batch[field.name].to(device, non_blocking=True).to(field.dtype)
        else:
            shape = field.shape(self.args.micro_batch_size, self.args.seq_length)
            tensor = torch.empty(shape, dtype=field.dtype, device=device)
        if self.args.tensor_model_parallel_size > 1:
            torch.distributed.broadcast(tensor, self.source, group=self.tensor_group)
        return tensor


def gpt_inputs(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """(tokens, labels, loss_mask, attention_mask, position_ids) of a microbatch; None where the stage has none."""
    return tuple(batch.get(key) for key in ("tokens", "labels", "loss_mask", "attention_mask", "position_ids"))


def language_model_loss(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Megatron's loss function of a language model.

    Args:
        loss_mask: float32 [b, s], 0 where a token does not count.
        output: cross entropy of each token, [b, s].

    Returns (sum of losses, number of tokens, {"lm loss": tensor [sum, tokens]}), the last for the log, detached.
    """
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(output.reshape(-1).float() * mask)
    num_tokens = mask.sum().to(torch.int)
    report = torch.stack([total.detach().clone(), num_tokens.to(total.dtype)])
    return total, num_tokens, {"lm loss": report}
