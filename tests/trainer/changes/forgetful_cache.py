"""A cache that has lost what it should have: `watch` of run_case.py."""

from collections.abc import Callable

from megatron.elastic.cache import ActivationCache
from megatron.trainer.start_up.run import Run


def of_the_second_rank(run: Run) -> Callable[[], None]:
    """There, every other sample is not found."""
    get = ActivationCache.get

    def forgetful(cache: ActivationCache, samples: list[int]) -> list:
        found = get(cache, samples)
        return [
            None if run.args.rank == 1 and sample % 2 else value for sample, value in zip(samples, found, strict=True)
        ]

    ActivationCache.get = forgetful

    def mend() -> None:
        ActivationCache.get = get

    return mend
