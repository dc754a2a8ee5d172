"""Why a run failed, from its exit status and its log: kind and one sentence, the failing rank's where it left one."""

import re

from megatron.planner.trial.results import Status
from megatron.processes.job import End

_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|MemoryError|can't allocate memory|cannot allocate memory|not enough memory"
    r"|bad_alloc|STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
# Of a rank, or of a process that loads its data; not what a launcher does itself to a rank that does not go.
_KILLED = re.compile(r"exitcode\s*:\s*-9\b|exit code -9\b|killed by signal: Killed")
_TIMED_OUT = re.compile(
    r"TimeoutError|timed out|has not ended after|did not come within|has not answered for", re.IGNORECASE
)
_WATCHDOG = re.compile(r"Watchdog caught collective operation timeout")  # NCCL's, which then ends the process
_WITHOUT_A_WORD = "ended without a word"  # what the failure guard tells of a rank that said nothing
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
    is_told = sentence is not None and _WITHOUT_A_WORD not in sentence
    if _OUT_OF_MEMORY.search(sentence if is_told else log):
        return Status.OUT_OF_MEMORY, sentence if is_told else _line(_OUT_OF_MEMORY, log)
    if _KILLED.search(log) or end.status == -9:
        told = f" ({sentence})" if sentence else ""
        return Status.OUT_OF_MEMORY, f"a rank was killed (signal 9), as the system does when memory ends{told}"
    if is_told and _TIMED_OUT.search(sentence):
        return Status.HANG, sentence
    if not is_told and _WATCHDOG.search(log):
        return Status.HANG, _line(_WATCHDOG, log)
    return Status.ERROR, sentence or f"ended with status {end.status} without a word: {progress}"


def _sentence(log: str) -> str | None:
    """What the failure guard told, a refusal, or an exception: of several the one that tells of memory, or the last."""
    for pattern in (_STORY, _REFUSAL):
        found = pattern.search(log)
        if found:
            return found["sentence"].strip()
    exceptions = [each.strip() for each in _EXCEPTION.findall(log) if "ChildFailedError" not in each]
    return next(filter(_OUT_OF_MEMORY.search, exceptions), exceptions[-1] if exceptions else None)


def _line(pattern: re.Pattern, log: str) -> str:
    return next(line.strip() for line in log.splitlines() if pattern.search(line))
