"""The picture of a run's last batches: `--pipeline-timeline`."""

from collections.abc import Collection
from pathlib import Path

from megatron.pipeline.runtime.timeline_files import write_timeline
from megatron.trainer.report.metrics import ByProduct
from megatron.trainer.start_up.run import Run


def draw_last_batches(run: Run, *, drains: Collection[int], may_lose_ranks: bool) -> None:
    """Write the files of `--pipeline-timeline` for the program that ran last. Collective; the pipeline must be drained.

    Args:
        drains: the batches before which the pipeline was drained.
        may_lose_ranks: whether a rank may be lost before the others have its part; then only the files are lost.
    """
    args, change = run.args, run.reporter.membership_change
    what = f"--pipeline-timeline {args.pipeline_timeline}"
    if not run.engine.tracer.batches():
        run.reporter.say(f"{what}: there is nothing to draw, since no batch ran in the last program")
    failures = (OSError, ValueError, *[RuntimeError] * may_lose_ranks)
    with ByProduct(what, consequence="without it", failures=failures).attempt():
        write_timeline(
            run.engine, Path(args.pipeline_timeline), drains=drains, most=args.pipeline_timeline_iterations,
            **({} if change is None else {"places": change.places, "note": change.title()}),
        )  # fmt: skip
