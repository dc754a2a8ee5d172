"""Which samples a rank trains on: `watch` of run_case.py."""

from collections.abc import Callable

from megatron.trainer.data.microbatches import MicrobatchIterator
from megatron.trainer.start_up.run import Run


def sample_ids(run: Run) -> Callable[[], list[tuple[int, int]]]:
    """(batch from 0 on, sample's number) of all that this rank's first stage has read in training."""
    found, following = [], MicrobatchIterator.__next__

    def noting(iterator: MicrobatchIterator) -> dict:
        begin = iterator.next_sample
        batch = following(iterator)
        if iterator.name == "training" and "sample_id" in batch:
            found.extend((begin // run.args.global_batch_size, number) for number in batch["sample_id"].tolist())
        return batch

    MicrobatchIterator.__next__ = noting

    def all_of_them() -> list[tuple[int, int]]:
        MicrobatchIterator.__next__ = following
        return found

    return all_of_them
