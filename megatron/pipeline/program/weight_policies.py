"""Which weights a batch uses, and when new ones are made: one table entry for each policy.

A pipeline that does not drain between batches meets a new batch while the one before it is under way, so somebody has
to say which weights each of them uses. Batches and versions are numbered over the whole training run; version 0 is the
initial one, and STEP@v makes version v from the gradients of batch v-1.

    policy   batch j uses                 STEP@v stands before                  live versions    source
    flush    j; drains after each batch   the first forward of batch v          1                PipeDream-2BW, 3.2
    2bw      max(j-1, 0)                  the first forward of batch v+1        2                PipeDream-2BW, 3.1
    delay k  max(j-k, 0)                  the first forward of batch v+k        k+1              flush, 2bw: k = 0, 1
    stash    the newest at the stage      whatever follows the chain of v       p-s at stage s   PipeDream
    stale    the newest, each time        whatever follows the chain of v       1                FTPipe, Table 1
    stale-predicted
             that, predicted ahead        whatever follows the chain of v       1, and one predicted    FTPipe, 4.2
    stale-provisional
             that, stepped ahead          whatever follows the chain of v       1, and one stepped      docs/ftpipe.md
    2bw-provisional
             j, predicted                 the first forward of batch v+1        2, and the true  docs/provisional.md

PipeDream's `stash` goes with orders that have p-s microbatches in flight at stage s, as 1F1B has, so that the newest
version there is always p-s-1 batches old, which is what the checker proves.

FTPipe's `stale` keeps one version: a forward uses the newest at its stage, and so do its recompute and its backward,
when others have been made. A stage of depth k (edges to the end) has its forward of microbatch i behind its backward of
microbatch i-k-1, and steps behind the last backward of a batch; so counted from the last drain it uses the version of
the batch that microbatch i-k belongs to, and in the backward that of its own batch. Batches may have any size
(accumulation). `stale-predicted` is the same, but a forward uses its version predicted as many steps ahead as that of
its backward is newer: F5@1+2. So many are known before the run (docs/ftpipe.md). Under `stale-provisional` a forward
uses the step that those microbatches of the batch under way lead to whose backwards are done: F5@1~3. Batches of one
microbatch leave none, so there it is `stale`.

The last row steps as 2bw does, so its weights are 2bw's; but batch j is computed at an estimate of version j: PREDICT@j
takes the step to it before the first forward of batch j, from the gradients of those microbatches of batch j-1 that are
done. So a version has two values: the predicted one, which computations use, and the true one, which STEP makes.

What the planning rooms, the runtime and the checkpoints have to know of a policy follows from its row. To add one,
enter it into `POLICIES`: `WeightPolicy("3bw", delay=2)` has batch j use max(j-2, 0), with 3 live versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from megatron.pipeline.program.instruction import Kind


class Ahead(Enum):
    """How the weights of a forward are ahead of its version, where that of its backward is newer. The value is what
    they are called.
    """

    PREDICTION = "predicted"  # to the version of the backward, by the optimizer's state: F5@1+2
    PROVISIONAL_STEP = "provisional"  # by the step that gradients lead to which no step has taken: F5@1~3


@dataclass(frozen=True)
class WeightPolicy:
    """Which weights a batch uses.

    Attributes:
        name: in `POLICIES`, and in a program's text.
        delay: batch j uses version max(j - delay, 0) at all stages, and the STEP that makes a version waits until the
            first forward that uses it is next. 0: a batch is through the pipeline before the next one begins. None:
            each stage uses its newest version, and steps as soon as it can.
        predicts: batch j uses a prediction of version j instead; with a delay of 1.
        refreshes: a recompute and a backward use what is the newest then; with a delay of None.
        ahead: how a forward may be ahead of its version, towards that of its backward, where these refresh, for which a
            stage has one more set of weights; None: not.

    Raises:
        ValueError: a delay that is no number of batches, or one that nothing can be predicted over.
    """

    name: str
    delay: int | None
    predicts: bool = False
    refreshes: bool = False
    ahead: Ahead | None = None

    def __post_init__(self) -> None:
        is_count = isinstance(self.delay, int) and not isinstance(self.delay, bool) and self.delay >= 0
        if self.delay is not None and not is_count:
            raise ValueError(
                f"weights {self.name} cannot have a delay of {self.delay} batches; give 0, 1, 2, ... or None"
            )
        if self.predicts and self.delay != 1:
            raise ValueError(
                f"weights {self.name} predict the step to come, which is one where the delay is 1, not {self.delay}"
            )

        if self.refreshes and self.delay is not None:
            raise ValueError(
                f"weights {self.name} refresh where each stage uses its newest version; give a delay of None, not "
                f"{self.delay}"
            )
        if self.ahead is not None and not self.refreshes:
            raise ValueError(
                f"weights {self.name} look ahead to those of the backward, which are the forward's own; have them "
                "refresh"
            )

    def __str__(self) -> str:
        return self.name

    @property
    def drains(self) -> bool:
        """Whether a batch is through the pipeline before the next one begins."""
        return self.delay == 0

    @property
    def updates_alone(self) -> bool:
        """Whether each stage makes versions at its own time, so that nothing may depend on all stages together."""
        return self.delay is None

    @property
    def overlaps_updates(self) -> bool:
        """Whether later batches run, with older versions, while all stages together update."""
        return bool(self.delay)

    @property
    def batch_size(self) -> int | None:
        """The only number of microbatches that a batch may have; None: any."""
        return 1 if self.delay is None and not self.refreshes else None

    def most_together(self, batches: Sequence[int]) -> int:
        """The most microbatches that can be under way at once in a program of batches of these sizes."""
        return max(batches) if self.drains else sum(batches)

    def full_batches(self, num_microbatches: int, num_batches: int) -> tuple[int, ...]:
        """The sizes of the batches of a program that holds as much as any: so many, or one where batches drain."""
        return (num_microbatches,) * (1 if self.drains else num_batches)

    @property
    def max_gradient_buffers(self) -> int:
        """The most batches whose gradients are summed up, reduced or waited for at once.

        While batch j is begun, the oldest that has not been stepped is j - delay. A stage that updates alone steps
        before its next backward.
        """
        return 1 if self.delay is None else self.delay + 1

    def max_live_versions(self, stage: int, num_stages: int) -> int:
        """The most versions that a stage holds at once, with one that is ahead."""
        if self.refreshes:
            return 2 if self.ahead and stage < num_stages - 1 else 1
        return num_stages - stage if self.delay is None else self.delay + 1

    @property
    def maker(self) -> Kind:
        """The word that makes the weights which computations use."""
        return Kind.PREDICT if self.predicts else Kind.STEP

    def version_of(self, batch: int, *, newest: int) -> int:
        """The version that the forward of `batch` uses at a stage whose newest version is `newest`."""
        if self.predicts:
            return batch
        return newest if self.delay is None else max(batch - self.delay, 0)

    @property
    def first_settled_batch(self) -> int:
        """From this batch of a run on, the versions of all batches lie equally far behind."""
        return self.delay if self.delay is not None else 1

    def entry_versions(self, first_batch: int) -> tuple[int, ...]:
        """The versions alive in a drained state before `first_batch`, ascending; all updates so far have been made.

        Of predicted ones it is the one that the next batch uses.
        """
        if self.predicts:
            return (first_batch,)
        return tuple(range(max(first_batch - (self.delay or 0), 0), first_batch + 1))

    def settling_batches(self, in_flight: int) -> int:
        """How many of the batches before a batch can matter to its segment, and to a drain after it.

        None, where every batch drains. Under a fixed delay as many: the oldest whose gradients the segment steps. Where
        stages use their newest weights, the batches whose backward is in the segment (`in_flight` at most at the first
        stage), and as many before them, which were in flight at their forwards and so fixed their versions.
        """
        return 2 * (in_flight - 1) if self.delay is None else self.delay

    def report_lag(self, num_stages: int) -> int:
        """By the end of batch i's segment every rank has stepped batch i - report_lag and posted its norm.

        That holds where batch i - report_lag lies in the same undrained stretch; a drain completes all.
        """
        return num_stages if self.delay is None else self.delay


FLUSH = WeightPolicy("flush", delay=0)
TWO_BW = WeightPolicy("2bw", delay=1)
STASH = WeightPolicy("stash", delay=None)
STALE = WeightPolicy("stale", delay=None, refreshes=True)
STALE_PREDICTED = WeightPolicy("stale-predicted", delay=None, refreshes=True, ahead=Ahead.PREDICTION)
STALE_PROVISIONAL = WeightPolicy("stale-provisional", delay=None, refreshes=True, ahead=Ahead.PROVISIONAL_STEP)
PROVISIONAL = WeightPolicy("2bw-provisional", delay=1, predicts=True)

_ALL = (FLUSH, TWO_BW, STASH, STALE, STALE_PREDICTED, STALE_PROVISIONAL, PROVISIONAL)
POLICIES: dict[str, WeightPolicy] = {policy.name: policy for policy in _ALL}
_PREDICTED = {TWO_BW: PROVISIONAL, STALE: STALE_PREDICTED}


def predicting(policy: WeightPolicy) -> WeightPolicy:
    """The policy that steps as this one does and predicts. Raises ValueError where there is none."""
    if policy not in _PREDICTED:
        raise ValueError(
            f"weights {policy} are not predicted: only those of {' and '.join(map(str, _PREDICTED))} are, whose "
            "batches are computed behind their step"
        )
    return _PREDICTED[policy]


def weight_policy(name: str | WeightPolicy) -> WeightPolicy:
    """The policy of that name; a policy is returned as it is. Raises ValueError for another name."""
    if isinstance(name, WeightPolicy):
        return name
    if name not in POLICIES:
        raise ValueError(f"there is no weight policy {name!r}; choose from {', '.join(POLICIES)}")
    policy = POLICIES[name]
    if policy.name != name:
        raise ValueError(f"weight policy {name} is registered with the name {policy.name}; give both the same name")
    return policy
