"""How configurations are run, whatever the configuration: what has to be alike for results to stand side by side."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """The settings of a run.

    Attributes:
        flags: of the training program, without those that a configuration decides.
        iterations, warmup: how many are trained, and how many of them are not measured.
        threads: of each rank in the operators of a CPU.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    flags: tuple[str, ...]
    iterations: int
    warmup: int
    threads: int

    def argv(self) -> tuple[str, ...]:
        """All of it, as `differences` takes it."""
        own = {"--iterations": self.iterations, "--warmup": self.warmup, "--threads": self.threads}
        return (*self.flags, *(str(part) for pair in own.items() for part in pair))


def differences(known: Sequence[str], given: Sequence[str], *, but: frozenset[str] = frozenset()) -> str:
    """What one command line says that the other does not: `--hidden-size 64 and not 128`; nothing where they agree.

    Args:
        known: flags and their values, of which the sentence is.
        but: flags that may differ.
    """
    first, second = _by_flag(known), _by_flag(given)
    told = []
    for flag in dict.fromkeys((*first, *second)):
        before, now = first.get(flag), second.get(flag)
        if before == now or flag in but:
            continue
        if before is None or now is None:
            told.append(f"{'no ' * (before is None)}{flag} {before if now is None else now}".rstrip())
        else:
            told.append(f"{flag} {before} and not {now}")
    return ", ".join(told)


def _by_flag(argv: Sequence[str]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for word in argv:
        if word.startswith("--"):
            values = found.setdefault(word, [])
        else:
            values.append(word)
    return {flag: " ".join(values) for flag, values in found.items()}
