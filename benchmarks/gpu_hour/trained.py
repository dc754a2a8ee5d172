"""A training run of one rank, built from flags as pretrain_gpt.py builds it, and driven batch by batch.

The parts of the hour train many sizes, a task each. `Tasks` gives the tasks to a process that has loaded torch and
megatron.core once. After a task that failed the next one gets a new process, so that neither memory nor an error
reaches it. Only the samples are not the trainer's.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.common.results import set_environment
from megatron import backend
from megatron.trainer.profile.pool import MeasuringError, MeasuringTask, Pool

FLAGS = (
    "--mock-data --tokenizer-type NullTokenizer --lr 1e-4 --lr-decay-style constant --weight-decay 0 --clip-grad 0 "
    "--eval-iters 0 --num-workers 0 --hidden-dropout 0 --attention-dropout 0 --bf16 --transformer-impl local "
    "--no-gradient-accumulation-fusion --untie-embeddings-and-output-weights --make-vocab-size-divisible-by 64"
)
"""Plain torch's layers in BF16, and untied embeddings, with which l2l has the bits of flush."""
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
"""Every layer is recomputed from its input."""
LOSS = "lm loss"


@dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of a GPT and of its batches: `microbatches` of `micro_batch` sequences.

    `vocabulary`: the rows of the embedding, a multiple of 64; NullTokenizer adds a word to those of --vocab-size.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    micro_batch: int = 1
    microbatches: int = 2
    vocabulary: int = 32000

    def model_argv(self) -> list[str]:
        """The flags of the model, without those that a planner's configuration decides."""
        sizes = {
            "num-layers": self.layers, "hidden-size": self.hidden, "num-attention-heads": self.heads,
            "seq-length": self.sequence, "max-position-embeddings": self.sequence, "vocab-size": self.vocabulary - 1,
        }  # fmt: skip
        return [*FLAGS.split(), *(word for name, size in sizes.items() for word in (f"--{name}", str(size)))]

    def argv(self, *flags: str) -> list[str]:
        """The flags of a run, and `flags`."""
        batch = {"micro-batch-size": self.micro_batch, "global-batch-size": self.micro_batch * self.microbatches}
        words = [word for name, size in batch.items() for word in (f"--{name}", str(size))]
        return [*self.model_argv(), *words, "--train-iters", "1000", *flags]

    @property
    def tokens(self) -> int:
        """The tokens of a batch."""
        return self.sequence * self.micro_batch * self.microbatches


NUM_SAMPLES = 4


class RandomTokens(torch.utils.data.Dataset):
    """Random tokens in the form of megatron.core's GPT datasets: the same few samples over and over, so that losses
    fall."""

    def __init__(self, sequence: int, vocabulary: int) -> None:
        self._sequence, self._vocabulary = sequence, vocabulary

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(
            self._vocabulary, (self._sequence + 1,), generator=torch.Generator().manual_seed(index % NUM_SAMPLES)
        )
        return {
            "tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": torch.ones(self._sequence),
            "position_ids": torch.arange(self._sequence),
        }  # fmt: skip


def random_datasets(args: Any, tokenizer: Any) -> Any:
    """The datasets of a run, in the place of those that its flags name: random tokens for training, and no others."""
    from megatron.trainer.data.datasets import Datasets

    return Datasets(parts=[RandomTokens(args.seq_length, args.vocab_size), None, None], has_split=(True, False, False))


def configured(argv: Sequence[str], store: Any) -> Any:
    """A run's configuration. The first one of a process joins the job and makes megatron.core's groups."""
    from megatron.core import parallel_state
    from megatron.trainer.arguments import parse_args
    from megatron.trainer.profile.pool import prepare
    from megatron.trainer.run.pretraining import complete

    parsed = parse_args(list(argv))
    return complete(parsed)[0] if parallel_state.is_initialized() else prepare(parsed, store)


class TrainingRun:
    """A run that pretrain_gpt.py would train: `batch()` trains a batch.

    Args:
        argv: flags of pretrain_gpt.py.
        store: of a job of this process alone; None: the process has joined its job.
    """

    def __init__(self, argv: Sequence[str], store: Any) -> None:
        from megatron.trainer.profile.pool import training_program
        from megatron.trainer.ranks import set_seeds
        from megatron.trainer.run.assembly import assemble

        args = configured(argv, store)
        set_seeds(args.seed)
        with redirect_stdout(sys.stderr):  # a part prints its own lines
            self.run = assemble(args, replace(training_program("gpt"), datasets_provider=random_datasets))
        self._iterators = self.run.samples(0, "training", 0)
        for stage, iterator in zip(self.run.stages, self._iterators, strict=True):
            stage.data_iterator = iterator

    def batch(self) -> list[float]:
        """Train a batch. Returns the losses of the batches that are reported meanwhile."""
        sizes = self.run.args.batch_sizes
        reports = self.run.engine.run_batch(sizes.num_microbatches(0), sizes.num_samples(0))
        return [report.losses[LOSS] for report in reports]

    def drain(self) -> list[float]:
        """Finish what is under way, on the device, too. Returns the losses that are still to be reported."""
        losses = [report.losses[LOSS] for report in self.run.engine.drain()]
        backend.synchronize()
        return losses

    def close(self) -> None:
        """End threads and loaders, and let go of the model."""
        for iterator in self._iterators:
            iterator.close()
        self.run.engine.close()
        self.run.update.close()
        self.run.reporter.close()
        for chunk in self.run.chunks:
            chunk._modules.clear()


@contextmanager
def training(argv: Sequence[str], store: Any) -> Iterator[TrainingRun]:
    """A run that is closed at the end of the block, if the block succeeds: the threads of one that failed may wait."""
    run = TrainingRun(argv, store)
    yield run
    run.close()


def iteration_seconds(
    argv: Sequence[str], *, warmup: int, iterations: int, store: Any, start: Callable[[], None]
) -> dict:
    """Train batches. Returns the seconds of each behind the warm-up as the trainer counts them, and the losses."""
    start()
    with training(argv, store) as run:
        seconds, losses = [], []
        for _ in range(warmup + iterations):
            began = time.perf_counter()
            losses += run.batch()
            seconds.append(time.perf_counter() - began)
        losses += run.drain()
    return {"seconds": seconds[warmup:], "losses": losses}


# --- tasks in a process of their own ----------------------------------------------------------------------------------

_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory|can't allocate memory|MemoryError|status -9\b")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it comes from, says that memory is short; verdicts of ranks have it as a text."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or _OUT_OF_MEMORY.search(f"{type(error).__name__}: {error}"):
            return True
        error = error.__cause__ or error.__context__
    return False


def first_line(text: object) -> str:
    return next(iter(str(text).splitlines()), "")[:300]


class Tasks:
    """A process that does one task after another; after one that failed a new process takes its place.

    Args:
        threads: CPU threads of its operators.
        timeout: the most seconds of a task.
    """

    def __init__(self, *, threads: int, timeout: float) -> None:
        self._threads, self._timeout = threads, timeout
        self._pool: Pool | None = None

    def __enter__(self) -> Tasks:
        return self

    def __exit__(self, kind: type | None, *rest: object) -> None:
        self._end(kind)

    @property
    def pool(self) -> Pool:
        """The process, started if there is none. Who uses it without `do` calls `renew` after an error."""
        if self._pool is None:
            self._pool = Pool(1, threads=self._threads, task_timeout=self._timeout)
        return self._pool

    def renew(self) -> None:
        self._end(MeasuringError)

    def do(self, run: Callable[..., dict], **arguments: Any) -> dict:
        """What `run` returns, which is called with `store`, `start` and the arguments.

        A run that fails returns `failed`, a sentence, and `out_of_memory`, whether that is why.
        """
        try:
            [found] = self.pool.do(MeasuringTask(num_ranks=1, num_jobs=1, run=run, arguments=arguments))
        except MeasuringError as error:
            print(error, file=sys.stderr, flush=True)
            self.renew()
            return {"failed": first_line(error), "out_of_memory": is_out_of_memory(error)}
        if "failed" in found:
            self.renew()
        return found

    def _end(self, kind: type | None) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.__exit__(kind)


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def prepare_environment(*, rehearse: bool) -> None:
    """Set what this process and those that it starts need: gloo on the loopback device, and in a rehearsal no GPU.

    Call it before anything asks CUDA.
    """
    set_environment()
    if rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
