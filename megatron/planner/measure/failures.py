"""Why a run failed, from its exit status and its log: kind and one sentence, the failing rank's where it left one."""

import re

from megatron.planner.measure.job import End
from megatron.planner.measure.records import Status

_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|MemoryError|can't allocate memory|cannot allocate memory|not enough memory",
    re.IGNORECASE,
)
_KILLED = re.compile(r"exitcode\s*:\s*-9\b|SIGKILL|exit code -9\b")
_TIMED_OUT = re.compile(
    r"TimeoutError|timed out|has not ended after|did not come within|has not answered for", re.IGNORECASE
)
_STORY = re.compile(r"^rank \d+.*? stops: (?P<sentence>.+)$", re.MULTILINE)  # of the failure guard, on every rank alike
_REFUSAL = re.compile(r"^\S+\.py: error: (?P<sentence>.+)$", re.MULTILINE)
_EXCEPTION = re.compile(
    r"^(?:\[rank\d+\]: )?(?P<sentence>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt): .+)$", re.MULTILINE
)


def classify(end: End, log: str, *, progress: str) -> tuple[Status, str]:
    """Kind and sentence of a run that did not end well.

    Args:
        log: all that it printed.
        progress: how far it came, in words.
    """
    if end.status is None:
        return Status.HANG, f"not at its end after {end.seconds:.0f} s: {progress}"
    sentence = _sentence(log)
    if _OUT_OF_MEMORY.search(sentence or log):
        return Status.OUT_OF_MEMORY, sentence or _line(_OUT_OF_MEMORY, log)
    if _KILLED.search(log) or end.status == -9:
        told = f" ({sentence})" if sentence else ""
        return Status.OUT_OF_MEMORY, f"a rank was killed (signal 9), as the system does when memory ends{told}"
    if sentence and _TIMED_OUT.search(sentence):
        return Status.HANG, sentence
    return Status.ERROR, sentence or f"ended with status {end.status} without a word: {progress}"


def _sentence(log: str) -> str | None:
    """What the failure guard told, a refusal, or the last exception; the first of these that is there."""
    for pattern in (_STORY, _REFUSAL):
        found = pattern.search(log)
        if found:
            return found["sentence"].strip()
    exceptions = _EXCEPTION.findall(log)
    ours = [each for each in exceptions if "ChildFailedError" not in each]
    return ours[-1].strip() if ours else None


def _line(pattern: re.Pattern, log: str) -> str:
    return next(line.strip() for line in log.splitlines() if pattern.search(line))
