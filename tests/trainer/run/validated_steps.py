"""What a run says of its optimistic steps, for the tests."""

from collections.abc import Callable

from megatron.trainer.start_up.run import Run


def validations(run: Run) -> Callable[[], list[bool]]:
    """For `watch`: whether each step was right, in the order of the steps."""
    validate, found = run.update.validate, []

    def noting(version: int) -> bool:
        found.append(validate(version))
        return found[-1]

    run.update.validate = noting
    return lambda: found
