"""Writing a checkpoint, synchronously or beside training, with the same outcome on all ranks.

Problem: megatron.core writes through forked processes and a spawned manager. A fork of a process with transfer threads
may deadlock, and the processes outlive a killed rank. If one rank fails (for example, on a full disk), the other ranks
hang, since each phase ends in a collective that the failing rank never reaches.

Solution: megatron.core plans the files of each rank and their format. This module writes the files: in the calling
thread, or for an asynchronous save in one background thread, from a copy of the tensors. Then every rank reports its
files with checksums, or its error, to rank 0 over a separate gloo group. Rank 0 adds the index and makes the checkpoint
visible, and all ranks learn the outcome.

If a rank is lost meanwhile, the others abandon the save (`abandon`). A lock makes rank 0 either commit before that or
never, so a thread that still runs cannot replace a later checkpoint. If rank 0 is the lost rank, the next owner of the
directory finds out there whether the commit was made (`completes`).
"""

import os
import queue
import threading
import time
from collections import ChainMap
from collections.abc import Callable
from contextlib import suppress
from inspect import signature
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.pipeline.runtime.failure.agreement import agree, agreed, control_group, on_rank_zero
from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.trainer.checkpoint.directory import (
    COMMON_FILE,
    BegunSave,
    begin,
    discard,
    finish_commit,
    read_tracker,
    save_with_torch,
    size_and_checksum,
    write_manifest,
)
from megatron.trainer.checkpoint.ownership import OWNER_PATIENCE, OwnerMark
from megatron.trainer.checkpoint.state import without_copies

# Newer versions of megatron.core write through another package unless they are told to use their own file writer.
_OWN_WRITER = ("mcore",) if "async_strategy" in signature(TorchDistSaveShardedStrategy.async_save).parameters else ()

_POLL_SECONDS = 0.2  # seconds between two checks of the mark of a process that may be dead, and of `interrupted`

# Bytes that torch.save and the index add to each tensor.
_BYTES_AROUND_A_TENSOR = 2048


class _PlanningStrategy(TorchDistSaveShardedStrategy):
    """megatron.core's strategy for the plan alone: it keeps the file writer and the index, and starts no save."""

    def async_save(self, sharded_state_dict, checkpoint_dir, *from_wrapper):
        # A queue within this process replaces megatron.core's queue, which a spawned process would serve.
        if filesystem_async._results_queue is None:
            filesystem_async._results_queue = queue.Queue()
        return super().async_save(sharded_state_dict, checkpoint_dir, *_OWN_WRITER)

    def _get_save_and_finalize_callbacks(self, writer, save_state_dict_ret, *own_writer):
        self.file_writer, self.index = writer, save_state_dict_ret[1]


class CheckpointWriter:
    """A writer of checkpoints into `root`, one at a time. `write` is collective: every rank must call it.

    Args:
        owner_mark: on rank 0, this job's mark on `root`; nothing is written unless the mark is valid.

    Attributes:
        has_saved: whether this job is known to have saved a checkpoint.
        broken_off: iteration, and inode of the staging directory, of an abandoned save of which this rank does not know
            whether it is complete; None if there is none. The caller resets it.
        interrupted: whether waits for a background thread end with RuntimeError, since a rank is lost.
    """

    def __init__(self, root: Path | str, *, owner_mark: OwnerMark | None = None):
        self.root = Path(root)
        self.has_saved = False
        self.broken_off: tuple[int, int] | None = None
        self.interrupted: Callable[[], bool] = lambda: False
        self._owner_mark = owner_mark
        self._save: BegunSave | None = None
        self._abandoned: list[threading.Thread] = []  # they may still write files

    def write(
        self,
        state: dict,
        iteration: int,
        *,
        content_metadata: dict,
        asynchronous: bool = False,
        fully_parallel: bool = True,
        on_saved: Callable[[Path], None] | None = None,
    ) -> None:
        """Save a sharded state dict as the checkpoint of `iteration`.

        An asynchronous save returns once the tensors are copied; `finish` and the next `write` wait for its end and
        raise its error.

        Args:
            content_metadata: the sharding of the state, stored for the load.
            fully_parallel: data-parallel replicas share the writing of tensors that they all hold.
            on_saved: called on rank 0 with the checkpoint's directory when it is durable and the latest; an
                asynchronous save calls it from the background thread.

        Raises:
            CheckpointError: on every rank, if any rank could not write; the written files are removed, and earlier
                checkpoints are unchanged.
        """
        self.finish()
        if asynchronous:
            while self._abandoned:
                self._wait_for(self._abandoned[-1])
                self._abandoned.pop()
            agree(None)  # no rank writes files of an abandoned save any more, which rank 0 removes now
        try:
            staging, inode = on_rank_zero(lambda: self._begin(iteration))
        except CheckpointError as error:
            raise CheckpointError(self._describe(iteration, str(error))) from error
        self._save = save = BegunSave(iteration, Path(staging), inode)
        try:
            strategy = self._plan(state, save.staging, content_metadata, fully_parallel)
            self._require_space(strategy.file_writer.write_buckets)
        except CheckpointError as error:
            self._save = None
            if dist.get_rank() == 0:
                discard(save.staging)
            raise CheckpointError(self._describe(iteration, str(error))) from error
        buckets = _on_host(strategy.file_writer.write_buckets, copy=asynchronous)
        strategy.file_writer.write_buckets = []
        group = control_group()  # the background thread must not make groups, nor use those of other ranks later

        def write() -> None:
            try:
                self._write_and_commit(save, group, strategy, buckets, on_saved)
            except Exception as error:
                # The frames of a traceback hold the tensors and the group.
                save.failure = error.with_traceback(None) if asynchronous else error

        if asynchronous:
            save.thread = threading.Thread(target=write, name="checkpoint", daemon=True)
            save.thread.start()
        else:
            write()
            self._conclude(save)

    def abandon(self) -> None:
        """Give up the save that has begun, if any, since a rank is lost. Not collective.

        If this is rank 0, the checkpoint is complete when this returns, or never will be. A background thread may write
        its files to the end, for which the next asynchronous save waits; its error is ignored.
        """
        save, self._save = self._save, None
        if save is None:
            return
        save.abandon()
        if save.thread is not None:
            self._abandoned.append(save.thread)
        self.has_saved |= save.is_complete
        if not save.is_complete:
            self.broken_off = save.iteration, save.inode

    def completes(self, iteration: int, inode: int) -> bool:
        """Whether a save that all ranks have abandoned has made its checkpoint. Called on rank 0, the owner.

        If the process that committed it was killed in between, the commit is finished. The arguments are those of
        `broken_off`. Raises CheckpointError if the directory cannot be read or written.
        """
        try:
            return finish_commit(self.root, iteration, inode)
        except OSError as error:
            raise CheckpointError(self._describe(iteration, str(error))) from error

    def settle(self, iteration: int, inode: int) -> bool:
        """As `completes`, whose result all ranks get. Collective. Rank 0 must be the owner.

        If the directory cannot be read or written, the checkpoint counts as not made: the next save tells all ranks.
        """
        is_complete = [False]
        if dist.get_rank() == 0:
            with suppress(CheckpointError):
                is_complete = [self.completes(iteration, inode)]
        dist.broadcast_object_list(is_complete, src=0)
        self.has_saved |= is_complete[0]
        return is_complete[0]

    def own(self) -> None:
        """Make this process, the new rank 0, the owner of the directory.

        Raises CheckpointError if it cannot, or if the previous owner does not end in time.
        """
        if self._owner_mark is not None:
            return
        mark, until = OwnerMark(self.root), time.monotonic() + OWNER_PATIENCE
        while not mark.try_to_take(until):  # a stopped process, for example, lives until its launcher ends it
            time.sleep(_POLL_SECONDS)
        self._owner_mark = mark

    def disown(self) -> None:
        """Give up the directory, so that another process can own it."""
        mark, self._owner_mark = self._owner_mark, None
        if mark is not None:
            mark.release()

    def finish(self) -> None:
        """Wait for an asynchronous save and raise its error; a no-op if there is none. Not collective.

        Raises:
            CheckpointError: on every rank, if any rank could not write.
            RuntimeError: a rank is lost, and the save is to be abandoned.
        """
        if self._save is not None and self._save.thread is not None:
            self._wait_for(self._save.thread)
            self._conclude(self._save)

    def _conclude(self, save: BegunSave) -> None:
        self.has_saved |= save.is_complete
        if save.failure is None or isinstance(save.failure, CheckpointError):
            self._save = None
        if save.failure is not None:
            raise save.failure

    def _wait_for(self, thread: threading.Thread) -> None:
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            if self.interrupted() and thread.is_alive():
                raise RuntimeError("a rank was lost while this one waited for the files of a checkpoint")

    def close(self) -> None:
        """Wait as `finish` does, and release the directory. Not collective."""
        try:
            self.finish()
            for thread in self._abandoned:
                thread.join()
        finally:
            if self._owner_mark is not None:
                self._owner_mark.release()

    def _begin(self, iteration: int) -> tuple[str, int]:
        self._require_mark()
        staging = begin(self.root, iteration)
        return str(staging), staging.stat().st_ino

    def _require_mark(self) -> None:
        if self._owner_mark is not None:
            self._owner_mark.require()

    def _plan(self, state: dict, staging: Path, content_metadata: dict, fully_parallel: bool) -> _PlanningStrategy:
        state["content_metadata"] = dict(content_metadata)
        sharded, common = save_preprocess(state, preprocess_common_before_consistancy_check=_without_arguments)
        problem, path = None, staging / COMMON_FILE
        if dist.get_rank() == 0:
            try:
                with open(path, "wb") as stream:
                    save_with_torch(common, stream)
            except (OSError, RuntimeError) as error:
                problem = f"cannot write {path}: {getattr(error, 'strerror', None) or error}"
        agree(problem)  # before any rank enters the collectives of a plan
        strategy = planning = _PlanningStrategy("torch_dist", 1, thread_count=2)
        if fully_parallel and _has_replicas():
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            strategy = FullyParallelSaveStrategyWrapper(planning, group)
        strategy.async_save(without_copies(sharded), str(staging))
        return planning

    def _require_space(self, buckets: list) -> None:
        """Raise CheckpointError if the disk has too little space for the checkpoint."""
        needed = torch.tensor([_num_bytes(buckets)], dtype=torch.int64)
        dist.all_reduce(needed, group=control_group())
        with agreed():
            if dist.get_rank() == 0:
                free = _free_bytes(self.root)
                if needed.item() > free:
                    raise CheckpointError(f"it needs {needed.item():,} bytes and {free:,} are free")

    def _write_and_commit(
        self,
        save: BegunSave,
        group: dist.ProcessGroup,
        strategy: _PlanningStrategy,
        buckets: list,
        on_saved: Callable[[Path], None] | None,
    ) -> None:
        try:
            report = _write_files(strategy.file_writer, buckets, save)
        except Exception as error:
            report = error
        save.require()
        rank = group.rank()
        reports: list | None = [None] * group.size() if rank == 0 else None
        dist.gather_object(_picklable(report), reports, dst=0, group=group)
        verdict: list[str | None] = [None]
        if rank == 0:
            problems = [f"rank {number}: {entry}" for number, entry in enumerate(reports) if isinstance(entry, str)]
            try:
                if not problems:
                    _write_index(strategy, save.staging, reports)
                    path = save.commit(self.root, self._require_mark)
            except Exception as error:
                save.require()
                problems.append(f"rank 0: {error}")
            if problems:
                verdict[0] = self._describe(save.iteration, "; ".join(problems[:4]))
                discard(save.staging)
            elif on_saved is not None:
                on_saved(path)
        dist.broadcast_object_list(verdict, src=0, group=group)
        if verdict[0] is not None:
            raise CheckpointError(verdict[0]) from (report if isinstance(report, Exception) else None)
        save.note_complete()

    def _describe(self, iteration: int, reason: str) -> str:
        try:
            latest = read_tracker(self.root)
        except (CheckpointError, OSError):
            latest = None
        intact = f"The checkpoint of iteration {latest} is intact" if latest is not None else "No earlier one existed"
        try:
            free = f" ({_free_bytes(self.root):,} bytes are free there)"
        except OSError:  # `reason` already names the cause
            free = ""
        return f"cannot save the checkpoint of iteration {iteration} in {self.root}: {reason}{free}. {intact}."


def _has_replicas() -> bool:
    """Whether any stage has replicas; the same on all ranks, though after a loss a rank may have no replica."""
    model = parallel_state.get_tensor_model_parallel_world_size()
    model *= parallel_state.get_pipeline_model_parallel_world_size()
    return dist.get_world_size() > model


def _without_arguments(common_state: dict) -> dict:
    """The part of the common state that must be equal on all ranks.

    The arguments are left out, since they contain ranks and paths; the arguments of rank 0 are stored.
    """
    return {name: value for name, value in common_state.items() if name != "args"}


def _write_files(writer: FileSystemWriterAsync, buckets: list, save: BegunSave) -> tuple[list, dict[str, dict]]:
    """Write this rank's files. Returns the items for the index, and the size and the checksum of each file by name."""
    transforms = [writer.transforms] if hasattr(writer, "transforms") else []
    items, checksums = [], {}
    for index, bucket in enumerate(buckets):
        save.require()
        path, name, _ = bucket
        results, countdown = queue.Queue(), queue.Queue()
        countdown.put(index)
        FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, results, countdown, True)
        _, outcome = results.get()
        if isinstance(outcome, Exception):
            raise CheckpointError(f"cannot write {path}: {outcome}") from outcome
        items += outcome
        checksums[name] = size_and_checksum(Path(path))
    return items, checksums


def _write_index(strategy: _PlanningStrategy, staging: Path, reports: list[tuple[list, dict]]) -> None:
    """Write the format's index, then the checksums of all files. Called on rank 0 after all ranks have written."""
    strategy.file_writer.finish(strategy.index, [items for items, _ in reports])
    save_config(CheckpointingConfig(strategy.backend, strategy.version), str(staging))
    write_manifest(staging, dict(ChainMap(*(checksums for _, checksums in reports))))


def _on_host(buckets: list, *, copy: bool) -> list:
    """The buckets with tensors in host memory. `copy`: copy tensors, since training changes them during the save."""
    return [
        (path, name, (objects, [(item, tensor.to("cpu", copy=copy)) for item, tensor in tensors]))
        for path, name, (objects, tensors) in buckets
    ]


def _num_bytes(buckets: list) -> int:
    return sum(
        sum(data.getbuffer().nbytes for _, data in objects)
        + sum(tensor.numel() * tensor.element_size() + _BYTES_AROUND_A_TENSOR for _, tensor in tensors)
        for _, _, (objects, tensors) in buckets
    )


def _free_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def _picklable(report: object) -> object:
    return str(report) if isinstance(report, Exception) else report
