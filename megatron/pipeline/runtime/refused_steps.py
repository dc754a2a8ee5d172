"""Optimistic steps of a run: what they need of its parts, and when too many were refused."""

from collections.abc import Sequence

from megatron.pipeline.runtime.contract.stage import AnyStage, AnyUpdate, OptimisticUpdate

OF_BATCHES = 100
MOST = OF_BATCHES // 20
"""Of so many batches, the most whose steps may be refused before there are no more optimistic steps."""


def require_undoable(update: AnyUpdate, stages: Sequence[AnyStage]) -> None:
    """Raise ValueError for an update or stages that cannot go back behind a step."""
    if not (isinstance(update, OptimisticUpdate) and all(hasattr(each, "begin_again") for each in stages)):
        raise ValueError(
            f"steps are optimistic, and {type(update).__name__} or {type(stages[0]).__name__} cannot go back behind "
            "one; give an OptimisticUpdate and stages that begin again, such as megatron.core's, or drop optimistic"
        )


class RefusedSteps:
    """Counts refused steps. All ranks refuse the same, so they agree on when there are too many."""

    def __init__(self) -> None:
        self._before: list[int] = []  # the batches before which steps were refused, of the last `OF_BATCHES`

    def note(self, batch: int) -> str | None:
        """Note that the step before `batch` was refused. Return a sentence for the log if these are too many."""
        self._before = [*(each for each in self._before if each > batch - OF_BATCHES), batch]
        if len(self._before) <= MOST:
            return None
        return (
            f"optimistic steps are off from iteration {batch + 1} on: {len(self._before)} of the last {OF_BATCHES} "
            "were refused, and each takes a batch back"
        )
