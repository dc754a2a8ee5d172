"""The decisions of a run to freeze layers and to change its arrangement.

At the end of an interval the pipeline is drained, rank 0 decides, and all ranks receive its decision. Other ranks might
decide differently, since measured times differ between ranks, and the last bits of norms between layouts. A checkpoint
contains the decision, whether or not the run has carried it out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from megatron import backend
from megatron.elastic.freezing import LayerNorms, Validation, ValidationWatch
from megatron.elastic.stages import Arrangement
from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.failure.agreement import on_rank_zero
from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.arguments.rules.freezing import make_rule
from megatron.trainer.changes.arrangement_choice import ArrangementChoice
from megatron.trainer.changes.prefix_cache import PrefixCache
from megatron.trainer.models.classifiers import ACCURACY
from megatron.trainer.plan.arrangement import Outlook, reading_changes
from megatron.trainer.report.log_line import main_loss

# --- freezing of layers -----------------------------------------------------------------------------------------------


class _Freezing:
    """The decisions about the number of frozen layers of a run.

    Attributes:
        num_frozen: the number of frozen layers by the last decision.
        watch: the validation results, which may end freezing.
        has_ended: whether freezing has ended, so that all layers train.
    """

    def __init__(self, args: TrainConfig) -> None:
        self._args = args
        self._rule = make_rule(args)
        self._norms = LayerNorms(args.num_layers)
        self.watch = ValidationWatch(args.freeze_watch_validation)
        self.num_frozen = 0
        self.has_ended = False

    def note(self, report: BatchReport) -> None:
        """Add the gradient norms of the layers in a batch."""
        if report.batch >= self._args.freeze_start and not report.skipped:
            self._norms.add(report.layers_squared)

    def decide(self) -> None:
        """Decide at the end of an interval whether more layers freeze.

        Called on one rank, which sends its `state_dict` to the others: the last bits of norms depend on the layout of
        the job, and a user's own rule may depend on anything.
        """
        if self.has_ended:
            self.num_frozen = 0
        else:
            self.num_frozen = max(self.num_frozen, int(self._rule.decide(self._norms.take())))

    def note_validation(self, losses: Mapping[str, float], *, iteration: int, num_frozen: int) -> str | None:
        """Note an evaluation of the validation data with `num_frozen` frozen layers, as `ValidationWatch.note` does."""
        name = ACCURACY if ACCURACY in losses else main_loss(losses)
        is_accuracy = name == ACCURACY
        return self.watch.note(Validation(name, losses[name], is_accuracy, iteration, num_frozen))

    def state_dict(self) -> dict[str, Any]:
        """The state of freezing that a checkpoint must save, as plain numbers."""
        return {
            "num_frozen": self.num_frozen,
            "rule": self._args.freeze_rule,
            "rule_state": self._rule.state_dict(),
            "norms": self._norms.state_dict(),
            "watch": self.watch.state_dict(),
            "has_ended": self.has_ended,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint. Raises CheckpointError if the checkpoint was made with another rule."""
        if state["rule"] != self._args.freeze_rule:
            raise CheckpointError(
                f"the checkpoint's layers were frozen by --freeze-rule {state['rule']}, and this run has "
                f"{self._args.freeze_rule}; use the same, or --finetune to begin anew with its weights"
            )
        self.num_frozen = int(state["num_frozen"])
        self._rule.load_state_dict(state["rule_state"])
        self._norms.load_state_dict(state["norms"])
        if "watch" in state:  # older checkpoints have none
            self.watch.load_state_dict(state["watch"])
            self.has_ended = bool(state["has_ended"])


# --- changes of the arrangement ---------------------------------------------------------------------------------------


class RunSoFar(Protocol):
    """The parts of a run that determine the choice of its next arrangement."""

    engine: PipelineEngine
    cache: PrefixCache | None
    iteration: int


class ChangeDecisions:
    """The decisions about the changes of one run.

    Attributes:
        wanted: the arrangement of the last decision.
        outlook: the expected times of the last decision; None if there are none.
    """

    def __init__(self, args: TrainConfig) -> None:
        self._args = args
        self._freezing = _Freezing(args) if args.freeze_training else None
        self._choice = None
        if args.elastic_pipeline or args.activation_cache is not None:
            self._choice = ArrangementChoice(args, device_bytes=_device_bytes(args))
        self.wanted: Arrangement = args.arrangement
        self.outlook: Outlook | None = None
        self._num_failed = self._num_paused = 0  # failed changes in a row; number of next decisions to drop

    def note(self, report: BatchReport) -> None:
        """Record the measurements of a batch that a decision needs."""
        if self._freezing is not None:
            self._freezing.note(report)

    def is_due(self, iteration: int) -> bool:
        """Whether an interval ends after `iteration` batches."""
        since = iteration - self._args.freeze_start
        return since > 0 and since % self._args.freeze_interval == 0

    def decide(self, run: RunSoFar) -> None:
        """Decide at the end of an interval, and set `wanted`.

        Collective: every rank must call it. The pipeline must be drained.
        """
        if self._choice is not None:
            self._choice.measure(run.engine, run.cache)
        state, outlook = on_rank_zero(lambda: self._decide(run.iteration))
        self._load(state)
        self.outlook = outlook
        if self._num_paused and self.wanted != self._args.arrangement:
            self._num_paused -= 1
            self.take_back()

    def note_validation(self, losses: Mapping[str, float], *, iteration: int) -> str | None:
        """Record an evaluation of the validation data, the same on all ranks.

        Returns a warning if layers are frozen and the result is worse than the best one; otherwise None.
        """
        if self._freezing is None:
            return None
        num_frozen = self._args.arrangement.num_frozen
        warning = self._freezing.note_validation(losses, iteration=iteration, num_frozen=num_frozen)
        end = "freezing ends, and all layers train again"
        if self._freezing.watch.tolerance is None:
            end = "frozen layers may cost that; --freeze-watch-validation TOLERANCE has all layers train again"
        return warning and f"{warning}: {end}"

    @property
    def is_to_thaw(self) -> bool:
        """Whether validation results have become so much worse that all layers must train again."""
        return self._freezing is not None and self._freezing.watch.has_fallen and not self._freezing.has_ended

    def thaw(self, run: RunSoFar) -> None:
        """End freezing, and set `wanted` to an arrangement without frozen layers.

        Collective: every rank must call it. The pipeline must be drained.
        """
        if self._choice is not None:
            self._choice.measure(run.engine, run.cache)
        self._freezing.has_ended = True
        state, outlook = on_rank_zero(lambda: self._decide(run.iteration, is_interval=False))
        self._load(state)
        self.outlook = outlook

    def cost_of_freezing(self) -> str | None:
        """A line for the end of a run about the cost of frozen layers in evaluations; None if no layers were frozen."""
        num_frozen = self._args.arrangement.num_frozen
        if self._freezing is None or not (num_frozen or self._freezing.has_ended):
            return None
        watch = self._freezing.watch
        seen = watch.summary()
        if seen is None:
            return (
                f"warning: {num_frozen} of {self._args.num_layers} layers are frozen, and no evaluation has shown what "
                "that costs; --eval-interval N and --freeze-watch-validation TOLERANCE do"
            )
        remedy = "" if watch.tolerance is not None else "; --freeze-watch-validation TOLERANCE ends freezing at a fall"
        return f"freezing: {seen}{remedy}"

    def _decide(self, iteration: int, *, is_interval: bool = True) -> tuple[dict[str, Any], Outlook | None]:
        wanted, outlook = self._args.arrangement, None
        if self._freezing is not None:
            self._freezing.decide()
            wanted = wanted.with_frozen(self._freezing.num_frozen)
            wanted.stages  # noqa: B018 - raises ValueError if the rule freezes layers that cannot be frozen
        if self._choice is not None:
            wanted, outlook = self._choice.decide(
                wanted, batches_left=self._args.train_iters - iteration, is_interval=is_interval
            )
        self.wanted = wanted
        return self.state_dict(), outlook

    def go_on_with(self, args: TrainConfig) -> None:
        """Switch to the configuration with which the run continues."""
        self._args = args
        if self._choice is not None:
            self._choice.args = args

    def note_change(self, seconds: float) -> None:
        """Record the seconds that a change took."""
        self._num_failed = 0
        if self._choice is not None:
            self._choice.seconds_of_change = seconds

    def expect_change(self, seconds: float) -> None:
        """Record the seconds that a change is expected to take, unless a change has been measured."""
        if self._choice is not None and not self._choice.seconds_of_change:
            self._choice.seconds_of_change = seconds

    def note_failure(self) -> None:
        """Record that a change failed. After repeated failures the next 1, 3, 7, ... decisions are dropped."""
        self._num_paused = 2**self._num_failed - 1
        self._num_failed += 1
        self.take_back()

    def take_back(self) -> None:
        """Drop the last decision, which is not carried out."""
        self.wanted, self.outlook = self._args.arrangement, None
        if self._freezing is not None:
            self._freezing.num_frozen = self.wanted.num_frozen

    def state_dict(self) -> dict[str, Any]:
        """The state of the decisions that a checkpoint must save, as plain numbers, the same on all ranks."""
        thaws = self.wanted.num_frozen < self._args.arrangement.num_frozen
        return {
            "first": self._args.first_arrangement.state_dict(),
            # a resumed run starts with the layers still frozen, without their optimizer state, and thaws them itself
            "wanted": (self._args.arrangement if thaws else self.wanted).state_dict(),
            "thawed": self.wanted.state_dict() if thaws else None,
            "freezing": None if self._freezing is None else self._freezing.state_dict(),
            "shaping": None if self._choice is None else self._choice.state_dict(),
        }

    def _load(self, state: dict[str, Any]) -> None:
        self.wanted = Arrangement.from_state(state.get("thawed") or state["wanted"])
        if self._freezing is not None and state["freezing"] is not None:
            self._freezing.load_state_dict(state["freezing"])
        if self._choice is not None and state["shaping"] is not None:
            self._choice.load_state_dict(state["shaping"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint. Raises CheckpointError for another rule or a damaged record."""
        with reading_changes(self._args):
            self._load(state)
            goes_on_as_it_was = Arrangement.from_state(state["wanted"]) == self._args.arrangement
        if state.get("thawed") is None:
            self.wanted = self._args.arrangement
        elif not goes_on_as_it_was:
            self.wanted = replace(self._args.arrangement, num_frozen=0, cached=False)


def _device_bytes(args: TrainConfig) -> float:
    """The bytes of memory of a rank's device; on a CPU, the rank's share of the host's memory."""
    sharing = 1 if backend.is_cuda() else int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))
    return backend.device_bytes() / sharing
