"""pretrain_gpt.py, or the program that PROGRAM names, whose ranks are lost at given places.

LOSSES is a list of losses, as JSON: [rank, place, number, what, start]. The process of this rank is lost when it comes
to the place for the number-th iteration, or to a place of a recovery or of what is due between batches for the
number-th time. `what` is a signal that the process sends to itself, `error`, which it raises, or `kill R`: then it
kills the process of rank R, and goes on. `start` counts the processes of a rank: 0, if it is left out, is the first,
and 1 the one that takes its place.

`newcomer` takes no rank away: the process waits there until a new process asks to be taken in, or all ranks are there.
`sleep S` takes none away: the process needs S seconds more there; with `hold S` it holds its interpreter meanwhile. Nor
does `alarm`: the process waits there until
another is lost, and then has an error of the connection.
The place `without sums` takes no rank away: the all-reduce with the norm breaks there, after others have got its sums.
The place `move` is on the thread of moves, when saved activations have been packed and the other rank waits for them.
A checkpoint has the places `save`, `copying`, `files`, `written` (before the gather), and on rank 0 `commit`, `tracker`
(between the two renames) and `committed`; with --async-save all but `copying` are on the thread that writes it.
The place `published` is in the making of a group in a recovery, where others have the rank's address and no connection.

With ENGINE the process finds Transformer Engine, of tests/stand_ins.

MOMENTS is a file to which each process appends a line for what happens: the time, its rank, what, and the iteration;
first that it has begun, with its process id.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from megatron.trainer.run import entry

RANK = int(os.environ.get("RANK", "0"))
START = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
PROGRAM = os.environ.get("PROGRAM", "pretrain_gpt")
TRAINED = importlib.import_module(f"megatron.trainer.programs.{PROGRAM}")
BROKEN = "Connection closed by peer [127.0.0.1]:1"  # as gloo says it


def note(what: str, iteration: int, rank: int = RANK) -> None:
    """Append a line to the file of MOMENTS, in one piece."""
    with open(os.environ["MOMENTS"], "a", encoding="utf-8") as stream:
        stream.write(f"{time.time()} {rank} {what} {iteration}\n")


def kill(rank: int) -> None:
    """Kill the latest process of a rank."""
    with open(os.environ["MOMENTS"], encoding="utf-8") as stream:
        lines = [line.split() for line in stream]
    os.kill(
        [int(process) for _, each, what, process in lines if (int(each), what) == (rank, "began")][-1], signal.SIGKILL
    )


class Places:
    """The losses of this rank that are to come, and what brings them about."""

    def __init__(self, losses: list) -> None:
        own = (rest for rank, *rest in losses if rank == RANK)
        self._losses = {(place, number): what for place, number, what, *start in own if (start or [0]) == [START]}
        self._counts: Counter[str] = Counter()
        self._iteration = lambda: 0
        self._membership = None

    def come_to(self, place: str, number: int | None = None) -> None:
        """Be lost here, if that is asked for. `number`: the iteration; None: the times that this place was come to."""
        if number is None:
            self._counts[place] += 1
            number = self._counts[place]
        what = self._losses.pop((place, number), None)
        if what is None:
            return
        act, _, other = what.partition(" ")
        note(f"{place.replace(' ', '_')}:{act}", self._iteration(), int(other) if act == "kill" else RANK)
        if act == "kill":
            kill(int(other))
            return
        if act == "hold":
            ctypes.PyDLL(None).sleep(int(other))
            return
        if act == "sleep":
            time.sleep(float(other))
            return
        if what == "newcomer":
            of_job = self._membership
            while not of_job.newcomers() and len(of_job.epoch.ranks) < of_job.world_size:
                time.sleep(0.05)
            return
        if what == "alarm":
            while self._membership.alarm is None:
                time.sleep(0.05)
            raise RuntimeError(BROKEN)
        if what == "error":
            raise RuntimeError(f"planted in {place}")
        if what == "broken":
            raise RuntimeError(BROKEN)
        os.kill(os.getpid(), signal.Signals[what])

    def watch(self) -> None:
        """Watch all places."""
        from megatron.pipeline.runtime.engine import PipelineEngine
        from megatron.pipeline.runtime.stages.megatron import update
        from megatron.pipeline.runtime.stages.megatron.base_update import BaseUpdate
        from megatron.pipeline.runtime.stages.megatron.redundant_shards import RedundantShards
        from megatron.pipeline.runtime.stages.megatron.stage import MegatronStage
        from megatron.pipeline.runtime.stages.megatron.update import MegatronWeightUpdate
        from megatron.pipeline.runtime.transport.move_links import GlooMoveLink
        from megatron.trainer.checkpoint import directory, writer
        from megatron.trainer.checkpoint.checkpoint import Restoration
        from megatron.trainer.data import datasets
        from megatron.trainer.report.log import Reporter
        from megatron.trainer.run import assembly, lost_ranks
        from megatron.trainer.run import loop as loop_module
        from megatron.trainer.run.core_groups import CoreGroups
        from megatron.trainer.run.loop import Loop
        from megatron.trainer.run.lost_ranks import LostRanks
        from megatron.trainer.run.lost_shards import LostShards
        from megatron.trainer.run.proved_losses import ProvedLosses
        from megatron.trainer.start_up import run as run_module

        def of_microbatch(place: str) -> Callable:
            return lambda stage, *rest: self.come_to(place, self._iteration() + 1)

        of_version, of_time = self._of_version, self._of_time

        def begun(loop, *rest, **options) -> None:
            self._iteration = lambda: loop.run.iteration
            self._membership = loop.lost_ranks.membership

        def reported(reporter, report, progress) -> None:
            if reporter.writes:
                note("reported", progress.iteration)

        around(Loop, "__init__", after=begun)
        around(MegatronStage, "forward", before=of_microbatch("forward"))
        around(MegatronStage, "backward", after=of_microbatch("backward"))
        around(MegatronStage, "backward_input", after=of_microbatch("backward"))  # where backwards are split
        around(GlooMoveLink, "send", before=of_microbatch("move"))
        around(MegatronWeightUpdate, "reduce_grad", before=of_version("chain"))
        around(MegatronWeightUpdate, "reduce_norm", before=of_version("norm"))
        around(MegatronWeightUpdate, "reduce_partial", before=of_version("partial"))
        around(MegatronWeightUpdate, "predict", before=of_version("predict"), after=of_version("predicted"))
        around(MegatronWeightUpdate, "step", before=of_version("step"), after=of_version("stepped"))
        around(
            BaseUpdate, "_fill", before=lambda _, report, *rest, **more: self.come_to("without sums", report.batch + 1)
        )
        around(ProvedLosses, "prove", before=lambda *_: note("met", 0))
        around(ProvedLosses, "prove", before=of_time("proofs"))
        around(CoreGroups, "name", before=of_time("groups"))
        around(assembly, "prepare_outputs", before=of_time("outputs"))
        around(assembly, "build_tokenizer", before=of_time("read"))
        around(datasets, "blends", before=of_time("indices"))
        around(assembly, "load_checkpoint", before=of_time("load"), after=of_time("loaded"))
        around(lost_ranks, "tell_new_processes", before=of_time("built"), after=of_time("told"))
        around(run_module, "build_optimizer", after=of_time("build"))  # at the start for the first time
        around(RedundantShards, "exchange", before=of_time("copy"), after=of_time("copied"))
        around(update, "gather_weights", before=of_time("gather"), after=of_time("gathered"))
        around(RedundantShards, "take_over", before=of_time("hand over"), after=of_time("handed over"))
        around(RedundantShards, "make_copies", before=of_time("new copies"))  # at the start for the first time
        around(LostShards, "_take", before=of_time("shards taken"))
        around(PipelineEngine, "evaluate", before=of_time("evaluation"))
        around(writer.CheckpointWriter, "_write_and_commit", before=of_time("save"))
        around(writer, "_on_host", before=of_time("copying"))
        around(writer, "_write_files", before=of_time("files"), after=of_time("written"))
        around(directory.BegunSave, "commit", before=of_time("commit"), after=of_time("committed"))
        around(directory, "_write_tracker", before=of_time("tracker"))
        around(loop_module, "draw_last_batches", before=of_time("timeline"))
        around(LostRanks, "_survivors", after=of_time("new groups"))
        if any(place == "published" for place, _ in self._losses):
            self._watch_addresses()
        around(LostRanks, "_hand_over", before=of_time("state"))
        around(Restoration, "complete", before=of_time("restoring"), after=of_time("restored"))
        around(MegatronWeightUpdate, "regroup", before=of_time("regroup"))
        around(LostRanks, "_begin", after=of_time("new program"))
        around(Reporter, "iteration", after=reported)

    def _of_version(self, place: str) -> Callable:
        return lambda update, version, *rest, **options: self.come_to(place, version)

    def _of_time(self, place: str) -> Callable:
        return lambda *arguments, **options: self.come_to(place)

    def _watch_addresses(self) -> None:
        from megatron.backend import gloo
        from tests.backend.asked_store import AskedStore

        make = gloo._make_group

        def made(group, store, *rest, **options) -> None:
            if gloo._connecting is not None:
                store = AskedStore(store, lambda: self.come_to("published"))
            make(group, store, *rest, **options)

        gloo._make_group = made


def around(owner: object, name: str, *, before: Callable | None = None, after: Callable | None = None) -> None:
    """Call `before` and `after` around a method or a module's function, with its arguments."""
    method = getattr(owner, name)

    def watched(*arguments, **options):
        if before is not None:
            before(*arguments, **options)
        result = method(*arguments, **options)
        if after is not None:
            after(*arguments, **options)
        return result

    setattr(owner, name, watched)


def program():
    """As that of the program."""
    if "LOSSES" in os.environ:
        note("began", os.getpid())
        Places(json.loads(os.environ["LOSSES"])).watch()
    return TRAINED.program()


def machine() -> AbstractContextManager:
    """A context in which a run finds what its machine has."""
    if "ENGINE" not in os.environ:
        return nullcontext()
    from megatron import backend  # imports torch

    backend.install()
    from tests.trainer.run.test_engine import as_on_a_gpu

    return as_on_a_gpu()


if __name__ == "__main__":
    with machine():
        sys.exit(entry.run(f"{PROGRAM}.py", program, defaults=getattr(TRAINED, "DEFAULTS", {})))
