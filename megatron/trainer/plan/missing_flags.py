"""What a training run needs and a command line does not say: all of it at once.

The rules of a start-up stop at the first fault. Who starts several runs with the same flags would learn of one missing
flag a run; so the rules that ask for flags are asked one by one, before any. No torch in here.
"""

from collections.abc import Sequence

from megatron.trainer.arguments import parse_args
from megatron.trainer.arguments.rules import data, model, run
from megatron.trainer.plan.command import PROGRAMS

_RULES = (model.required, run.learning_rate, data.data, data.text)


def missing_flags(argv: Sequence[str], *, architecture: str, iterations: int) -> list[str]:
    """A sentence for each rule that a run of so many iterations would break, whatever its configuration.

    Raises ValueError as `parse_args`.
    """
    program, defaults = PROGRAMS[architecture]
    args = parse_args([*argv, "--micro-batch-size", "1", "--train-iters", str(iterations)], prog=program,
                      defaults=defaults)  # fmt: skip
    found = []
    for rule in _RULES:
        try:
            rule(args)
        except ValueError as error:
            found.append(str(error))
    return found
