"""Freezing while a run trains: by which norms it is decided, and what a checkpoint keeps of it."""

import argparse
from collections.abc import Mapping
from typing import Any

from megatron.elastic.freeze_rule import LayerNorms
from megatron.elastic.validation_watch import Validation, ValidationWatch
from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.trainer.arguments.rules.freezing import make_rule
from megatron.trainer.models.classifiers import ACCURACY
from megatron.trainer.report.log import main_loss


class Freezing:
    """How many layers of a run are to be frozen.

    Attributes:
        num_frozen: layers, by the last decision.
        watch: what evaluations say of it.
        has_ended: all layers train from now on.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._rule = make_rule(args)
        self._norms = LayerNorms(args.num_layers)
        self.watch = ValidationWatch(args.freeze_watch_validation)
        self.num_frozen = 0
        self.has_ended = False

    def note(self, report: BatchReport) -> None:
        """Count in the norms of a batch's layers."""
        if report.batch >= self._args.freeze_start and not report.skipped:
            self._norms.add(report.layers_squared)

    def decide(self) -> None:
        """End an interval: by the rule, more layers may be frozen from now on.

        To be asked on one rank, which tells the others what it has by then (`state_dict`): last bits of the norms
        depend on the layout of the job, and a rule of a user's own may do anything.
        """
        if self.has_ended:
            self.num_frozen = 0
        else:
            self.num_frozen = max(self.num_frozen, int(self._rule.decide(self._norms.take())))

    def note_validation(self, losses: Mapping[str, float], *, iteration: int, num_frozen: int) -> str | None:
        """As `ValidationWatch.note`: an evaluation of the validation data, made with so many layers frozen."""
        name = ACCURACY if ACCURACY in losses else main_loss(losses)
        is_accuracy = name == ACCURACY
        return self.watch.note(Validation(name, losses[name], is_accuracy, iteration, num_frozen))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain numbers."""
        return {
            "num_frozen": self.num_frozen,
            "rule": self._args.freeze_rule,
            "rule_state": self._rule.state_dict(),
            "norms": self._norms.state_dict(),
            "watch": self.watch.state_dict(),
            "has_ended": self.has_ended,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as a checkpoint says. Raises CheckpointError where another rule has decided."""
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
