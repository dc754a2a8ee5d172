"""The weight policies: which weights a batch uses, and when new weights are made.

A pipeline that does not drain between batches begins a batch while the batch before it is under way. So a policy has to
say which weights each batch uses. Batches and versions are numbered over the whole training run. Version 0 is the
initial one, and STEP@v makes version v from the gradients of batch v-1.

    policy              batch j uses                STEP@v stands                  live versions    source
    flush               j; the pipeline drains      before forwards of batch v     1                PipeDream-2BW, 3.2
    2bw                 max(j-1, 0)                 before forwards of batch v+1   2                PipeDream-2BW, 3.1
    delay k             max(j-k, 0)                 before forwards of batch v+k   k+1              flush, 2bw: k = 0, 1
    stash               the newest at its forward   after the chain of v           p-s at stage s   PipeDream
    stale               the newest at each use      after the chain of v           1                FTPipe, Table 1
    stale-predicted     as stale, but predicted     after the chain of v           1 + 1 predicted  FTPipe, 4.2
    stale-provisional   as stale, but stepped       after the chain of v           1 + 1 stepped    docs/ftpipe.md
    2bw-provisional     j, predicted                before forwards of batch v+1   2 + 1 true       docs/provisional.md

`stash` goes with orders that have p-s microbatches in flight at stage s, as 1F1B has. The newest version at stage s is
then p-s-1 batches old, which the checker proves.

`stale` keeps one version. A stage of depth k (the number of edges to the end) has its forward of microbatch i after its
backward of microbatch i-k-1, and steps after the last backward of a batch. Counted from the last drain, the forward
uses the version of the batch of microbatch i-k, and the backward that of its own batch. Batches may have any size, with
gradients accumulated over their microbatches.

`stale-predicted` is like `stale`, but a forward uses a prediction from its version to the version of its backward:
F5@1+2 predicts two steps. The number of steps is known before the run (docs/ftpipe.md).

`stale-provisional` is like `stale`, but a forward uses a provisional step from its version. The step is made from the
microbatches of the batch under way whose backwards are done: F5@1~3. A batch of one microbatch leaves no such
microbatches, so the policy then equals `stale`.

`2bw-provisional` steps as 2bw does, but batch j is computed at an estimate of version j. PREDICT@j makes the estimate
before the first forward of batch j, from the microbatches of batch j-1 whose backwards are done. So a version has two
values: the predicted one, which computations use, and the true one, which STEP makes.

The planner, the runtime and the checkpoints derive everything that depends on the policy from its row. To add a policy,
enter it into `POLICIES`: with `WeightPolicy("3bw", delay=2)`, batch j uses version max(j-2, 0), and 3 versions live.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from megatron.pipeline.program.instruction import Kind


class Ahead(Enum):
    """How a forward gets weights ahead of its version if its backward uses a newer version.

    The value is the adjective for such weights in messages.
    """

    PREDICTION = "predicted"  # predicted from the optimizer's state up to the version of the backward: F5@1+2
    PROVISIONAL_STEP = "provisional"  # stepped with the gradients that no STEP has applied yet: F5@1~3


@dataclass(frozen=True)
class WeightPolicy:
    """A rule for the weights that a batch uses.

    Attributes:
        name: the key in `POLICIES`, and the name in the text of programs.
        delay: batch j uses version max(j - delay, 0) at all stages, and the STEP that makes a version stands directly
            before the first forward that uses the version. 0: a batch leaves the pipeline before the next one begins.
            None: each stage uses its newest version, and steps as soon as it can.
        predicts: batch j uses a prediction of version j instead. Needs a delay of 1.
        refreshes: a recompute and a backward use the version that is newest at that time. Needs a delay of None.
        ahead: how a forward gets weights ahead of its version, which take one more set of weights at the stage. Needs
            `refreshes`. None: a forward uses its version as it is.

    Raises:
        ValueError: the delay is no number of batches, or does not fit `predicts` or `refreshes`, or `ahead` is set
            without `refreshes`.
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
                f"weights {self.name} predict one step, so their delay has to be 1, not {self.delay}; give 1"
            )

        if self.refreshes and self.delay is not None:
            raise ValueError(
                f"weights {self.name} refresh where each stage uses its newest version; give a delay of None, not "
                f"{self.delay}"
            )
        if self.ahead is not None and not self.refreshes:
            raise ValueError(
                f"weights {self.name} set `ahead`, and without `refreshes` a backward uses the weights of its forward; "
                "set `refreshes`, or leave `ahead` out"
            )

    def __str__(self) -> str:
        return self.name

    @property
    def drains(self) -> bool:
        """Whether a batch leaves the pipeline before the next one begins."""
        return self.delay == 0

    @property
    def updates_alone(self) -> bool:
        """Whether each stage steps at its own time, so that no update may depend on several stages."""
        return self.delay is None

    @property
    def overlaps_updates(self) -> bool:
        """Whether an update of all stages runs while later batches compute with older versions."""
        return bool(self.delay)

    @property
    def batch_size(self) -> int | None:
        """The number of microbatches that a batch has to have; None: any number."""
        return 1 if self.delay is None and not self.refreshes else None

    def most_together(self, batches: Sequence[int]) -> int:
        """Return a bound on the microbatches that are under way at once in a program of batches of these sizes."""
        return max(batches) if self.drains else sum(batches)

    def full_batches(self, num_microbatches: int, num_batches: int) -> tuple[int, ...]:
        """Return the batch sizes of a program that needs as much memory as any longer one.

        These are `num_batches` batches, or a single batch if the pipeline drains after each.
        """
        return (num_microbatches,) * (1 if self.drains else num_batches)

    @property
    def max_gradient_buffers(self) -> int:
        """The largest number of batches whose gradients exist at once.

        When batch j begins, the oldest batch without its step is j - delay. A stage that updates alone steps before its
        next backward.
        """
        return 1 if self.delay is None else self.delay + 1

    def max_live_versions(self, stage: int, num_stages: int) -> int:
        """Return the largest number of versions that a stage holds at once, including weights ahead of a version."""
        if self.refreshes:
            return 2 if self.ahead and stage < num_stages - 1 else 1
        return num_stages - stage if self.delay is None else self.delay + 1

    @property
    def maker(self) -> Kind:
        """The kind of instruction that makes the weights for computations."""
        return Kind.PREDICT if self.predicts else Kind.STEP

    def version_of(self, batch: int, *, newest: int) -> int:
        """Return the version that the forward of `batch` uses at a stage whose newest version is `newest`."""
        if self.predicts:
            return batch
        return newest if self.delay is None else max(batch - self.delay, 0)

    @property
    def first_settled_batch(self) -> int:
        """The first batch of a run from which on batches use versions of a constant age in batches."""
        return self.delay if self.delay is not None else 1

    def entry_versions(self, first_batch: int) -> tuple[int, ...]:
        """Return the versions that are alive in a drained state before `first_batch`, ascending.

        All updates of earlier batches have been made by then. If the policy predicts, the only entry version is the one
        that the next batch uses.
        """
        if self.predicts:
            return (first_batch,)
        return tuple(range(max(first_batch - (self.delay or 0), 0), first_batch + 1))

    def settling_batches(self, in_flight: int) -> int:
        """Return how many of the batches before a batch can affect its segment and a drain after it.

        With a fixed delay this is the delay: the oldest of these batches is stepped in the segment. A delay of 0 leaves
        no such batch. If each stage uses its newest version, two groups of batches matter. The first group has its
        backwards in the segment. The second group was in flight during the forwards of the first one, and so fixed
        their versions.

        Args:
            in_flight: the largest number of microbatches in flight at the first trained stage.
        """
        return 2 * (in_flight - 1) if self.delay is None else self.delay

    def report_lag(self, num_stages: int) -> int:
        """Return the number of batches by which reports are late.

        At the end of the segment of batch i, every rank has stepped batch i - report_lag and posted its norm. This
        holds for batches since the last drain; a drain completes all earlier ones.
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
    """Return the policy that steps as `policy` does and also predicts. Raises ValueError if there is none."""
    if policy not in _PREDICTED:
        raise ValueError(
            f"weights {policy} are not predicted; use {' or '.join(map(str, _PREDICTED))}, whose batches are computed "
            "at weights of an earlier step"
        )
    return _PREDICTED[policy]


def weight_policy(name: str | WeightPolicy) -> WeightPolicy:
    """Return the policy of a name; a `WeightPolicy` is returned as it is.

    Raises:
        ValueError: the name is unknown, or registered for a policy with another name.
    """
    if isinstance(name, WeightPolicy):
        return name
    if name not in POLICIES:
        raise ValueError(f"there is no weight policy {name!r}; choose from {', '.join(POLICIES)}")
    policy = POLICIES[name]
    if policy.name != name:
        raise ValueError(f"weight policy {name} is registered with the name {policy.name}; give both the same name")
    return policy
