"""pretrain_gpt.py whose ranks are lost at given places.

LOSSES is a list of losses, as JSON: [rank, place, number, what]. The rank with this number at the start is lost when it
comes to the place for the number-th iteration, or to a place of a recovery or of what is due between batches for the
number-th time. `what` is a signal that the process sends to itself, or `error`, which it raises.

The place `without sums` takes no rank away: the all-reduce with the norm breaks there, after others have got its sums.

MOMENTS is a file to which each process appends a line for what happens: the time, its rank, what, and the iteration;
first that it has begun, with its process id.
"""

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable

from megatron.trainer.programs import pretrain_gpt
from megatron.trainer.run import entry

RANK = int(os.environ.get("RANK", "0"))
BROKEN = "Connection closed by peer [127.0.0.1]:1"  # as gloo says it


def note(what: str, iteration: int) -> None:
    """Append a line to the file of MOMENTS, in one piece."""
    with open(os.environ["MOMENTS"], "a", encoding="utf-8") as stream:
        stream.write(f"{time.time()} {RANK} {what} {iteration}\n")


class Places:
    """The losses of this rank that are to come, and what brings them about."""

    def __init__(self, losses: list) -> None:
        self._losses = {(place, number): what for rank, place, number, what in losses if rank == RANK}
        self._counts: Counter[str] = Counter()
        self._iteration = lambda: 0

    def come_to(self, place: str, number: int | None = None) -> None:
        """Be lost here, if that is asked for. `number`: the iteration; None: the times that this place was come to."""
        if number is None:
            self._counts[place] += 1
            number = self._counts[place]
        what = self._losses.pop((place, number), None)
        if what is None:
            return
        note(f"{place.replace(' ', '_')}:{what}", self._iteration())
        if what == "error":
            raise RuntimeError(f"planted in {place}")
        if what == "broken":
            raise RuntimeError(BROKEN)
        os.kill(os.getpid(), signal.Signals[what])

    def watch(self) -> None:
        """Watch all places."""
        from megatron.pipeline.runtime.engine import PipelineEngine
        from megatron.pipeline.runtime.stages.megatron import update
        from megatron.pipeline.runtime.stages.megatron.core_update import Decisions
        from megatron.pipeline.runtime.stages.megatron.redundant_shards import RedundantShards
        from megatron.pipeline.runtime.stages.megatron.stage import MegatronStage
        from megatron.pipeline.runtime.stages.megatron.update import MegatronWeightUpdate
        from megatron.trainer.checkpoint.writer import CheckpointWriter
        from megatron.trainer.report.log import Reporter
        from megatron.trainer.run.loop import Loop
        from megatron.trainer.run.lost_ranks import LostRanks
        from megatron.trainer.run.lost_shards import LostShards

        def of_microbatch(place: str) -> Callable:
            return lambda stage, *rest: self.come_to(place, self._iteration() + 1)

        def of_version(place: str) -> Callable:
            return lambda update, version, *rest, **options: self.come_to(place, version)

        def of_time(place: str) -> Callable:
            return lambda *arguments, **options: self.come_to(place)

        def begun(loop, *rest, **options) -> None:
            self._iteration = lambda: loop.run.iteration

        def reported(reporter, report, progress) -> None:
            if reporter.writes:
                note("reported", progress.iteration)

        _around(Loop, "__init__", after=begun)
        _around(MegatronStage, "forward", before=of_microbatch("forward"))
        _around(MegatronStage, "backward", after=of_microbatch("backward"))
        _around(MegatronStage, "backward_input", after=of_microbatch("backward"))  # where backwards are split
        _around(MegatronWeightUpdate, "reduce_grad", before=of_version("chain"))
        _around(MegatronWeightUpdate, "reduce_norm", before=of_version("norm"))
        _around(MegatronWeightUpdate, "step", before=of_version("step"), after=of_version("stepped"))
        _around(
            Decisions, "fill", before=lambda _, report, *rest, **more: self.come_to("without sums", report.batch + 1)
        )
        _around(RedundantShards, "exchange", before=of_time("copy"), after=of_time("copied"))
        _around(update, "gather_weights", before=of_time("gather"), after=of_time("gathered"))
        _around(RedundantShards, "hand_over", before=of_time("hand over"), after=of_time("handed over"))
        _around(RedundantShards, "make_copy", before=of_time("new copies"))  # at the start for the first time
        _around(LostShards, "_take", before=of_time("shards taken"))
        _around(PipelineEngine, "evaluate", before=of_time("evaluation"))
        _around(CheckpointWriter, "_write_and_commit", before=of_time("save"))
        _around(LostRanks, "_make_groups", before=of_time("new groups"))
        _around(LostRanks, "_begin", after=of_time("new program"))
        _around(Reporter, "iteration", after=reported)


def _around(owner: object, name: str, *, before: Callable | None = None, after: Callable | None = None) -> None:
    """Call `before` and `after` around a method, with its arguments."""
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
    """As pretrain_gpt.program."""
    if "LOSSES" in os.environ:
        note("began", os.getpid())
        Places(json.loads(os.environ["LOSSES"])).watch()
    return pretrain_gpt.program()


if __name__ == "__main__":
    sys.exit(entry.run("pretrain_gpt.py", program))
