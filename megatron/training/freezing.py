"""Freezing while a run trains: when it is decided, by which norms, and what a checkpoint keeps of it.

The decision is rank 0's, which tells the others: last bits of the norms depend on the layout of the job, and so it
could differ from rank to rank of another one.
"""

import argparse
from typing import Any

import torch.distributed as dist

from megatron.elastic.freeze_rule import LayerNorms
from megatron.elastic.stages import Stages, stages_of
from megatron.pipeline.runtime.stage import BatchReport
from megatron.training import config, plan
from megatron.training.arguments.rules_freezing import make_rule
from megatron.training.checkpoint.agreement import control_group
from megatron.training.checkpoint.errors import CheckpointError


class Freezing:
    """How many layers of a run are frozen, and when more are.

    Attributes:
        num_frozen: layers, by now. `args.frozen_stages` follows it.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._rule = make_rule(args)
        self._norms = LayerNorms(args.num_layers)
        self._layers_of_rank = plan.layers_of_stages(config.transformer_config(args))
        self.num_frozen = 0

    def note(self, report: BatchReport) -> None:
        """Count in the norms of a batch's layers."""
        if report.batch >= self._args.freeze_start and not report.skipped:
            self._norms.add(report.layers_squared)

    def is_due(self, iteration: int) -> bool:
        """Whether an interval ends behind so many batches."""
        since = iteration - self._args.freeze_start
        return since > 0 and since % self._args.freeze_interval == 0

    def decide(self) -> bool:
        """End an interval: whether more layers are frozen from now on. Collective, drained."""
        norms, message = self._norms.take(), [None]
        if dist.get_rank() == 0:
            message = [(max(self.num_frozen, self._rule.decide(norms)), self._rule.state_dict())]
        dist.broadcast_object_list(message, src=0, group=control_group())
        [(num_frozen, state)] = message
        self._rule.load_state_dict(state)
        before, self.num_frozen = self.num_frozen, num_frozen
        return num_frozen > before

    def set_stages(self) -> Stages | None:
        """Let `args` say which stages the pipeline has from now on. Returns what they said before."""
        before = self._args.frozen_stages
        self._args.frozen_stages = stages_of(self._layers_of_rank, self.num_frozen) if self.num_frozen else None
        return before

    def take_back(self, before: Stages | None) -> None:
        """The pipeline has the stages of before again."""
        self._args.frozen_stages = before
        self.num_frozen = 0 if before is None else sum(before.layers[: before.num_frozen])

    def describe(self) -> str:
        """One line for the log."""
        stages, ranks = self._args.frozen_stages, []
        for rank in range(self._args.pipeline_model_parallel_size):
            own = [
                f"{layers}{' frozen' * (stage < stages.num_frozen)}"
                for stage, (layers, at) in enumerate(zip(stages.layers, stages.rank_of_stage, strict=True))
                if at == rank
            ]
            ranks.append(" + ".join(own))
        return f"{self.num_frozen} of {self._args.num_layers} layers are frozen (layers by rank: {' | '.join(ranks)})"

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain numbers, the same on all ranks."""
        return {
            "num_frozen": self.num_frozen,
            "rule": self._args.freeze_rule,
            "rule_state": self._rule.state_dict(),
            "norms": self._norms.state_dict(),
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


def freezing_of(args: argparse.Namespace, recorded: dict[str, Any] | None) -> Freezing | None:
    """The freezing of a run that goes on from what a checkpoint has `recorded`; None where it freezes nothing.

    Raises CheckpointError where the checkpoint has frozen layers and the run would train them.
    """
    if not args.freeze_training:
        if recorded is not None and recorded["num_frozen"]:
            raise CheckpointError(
                f"--load {args.load}: {recorded['num_frozen']} layers of the checkpoint are frozen, and their "
                "optimizer state is gone; add --freeze-training, or --finetune to begin anew with its weights"
            )
        return None
    freezing = Freezing(args)
    if recorded is not None:
        freezing.load_state_dict(recorded)
        freezing.set_stages()
    return freezing
