"""The best checkpoint of a run, and the end of a run that no longer improves, as in transformers' trainer.

An evaluation is the best if its metric is strictly better than in all evaluations before. A checkpoint counts as the
best if it was written right after such an evaluation. Patience counts evaluations that are not better than the best one
before by more than a threshold (transformers' `EarlyStoppingCallback`).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.finetuning.data.text_metrics import TEXT_METRICS
from megatron.finetuning.generation_arguments import metrics_of

METRICS = {
    "text-to-text": ("token_accuracy", "exact_match"),
    "sequence-classification": ("accuracy",),
    "causal-lm": ("perplexity",),
    "chat": ("perplexity", "token_accuracy"),
    "dpo": ("rewards_accuracy", "rewards_margin", "rewards_chosen", "rewards_rejected"),
    "masked-lm": ("perplexity",),
    "multiple-choice": ("accuracy",),
    "regression": ("mse", "mae", "pearson", "spearman"),
    "token-classification": ("accuracy", "precision", "recall", "f1"),
    "question-answering": ("f1", "exact_match"),
    "image-classification": ("accuracy",),
    "audio-classification": ("accuracy",),
    "ctc": ("wer", "cer"),
    "speech-to-text": ("perplexity", "token_accuracy", "exact_match"),
    "contrastive-image-text": ("image_to_text_accuracy", "text_to_image_accuracy"),
    "image-text-to-text": ("perplexity", "token_accuracy"),
}
"""Word of --task -> the metrics of its evaluations besides the loss. Some data have no entities or correlations."""

SMALLER_IS_BETTER = ("loss", "perplexity", "mse", "mae", "wer", "cer")


def settle(args: argparse.Namespace) -> None:
    """Fill in the flags of the best checkpoint that follow from others.

    Raises ValueError if checkpoints or evaluations do not fit the flags, or the metric is none of the task's.
    """
    asked = _asked(args)
    if asked is None:
        for name in ("metric_for_best_model", "greater_is_better", "early_stopping_threshold"):
            if getattr(args, name) is not None:
                args.notes.append(f"--{name} has no effect without --load_best_model_at_end, --save_strategy best or "
                                  "--early_stopping_patience")  # fmt: skip
        return
    if args.eval_strategy == "no":
        raise ValueError(f"{asked} compares evaluations during training; give --eval_strategy steps or epoch")
    if args.early_stopping_threshold is not None and args.early_stopping_patience is None:
        args.notes.append("--early_stopping_threshold means nothing without --early_stopping_patience")
    if args.load_best_model_at_end and args.save_strategy not in ("best", args.eval_strategy):
        raise ValueError(
            f"--load_best_model_at_end loads a checkpoint that was evaluated, and --save_strategy is "
            f"{args.save_strategy} where --eval_strategy is {args.eval_strategy}; give both the same, or "
            "--save_strategy best"
        )
    name = args.metric_for_best_model = (args.metric_for_best_model or "loss").removeprefix("eval_")
    known = ["loss", *METRICS[args.task]]
    if args.predict_with_generate:
        known += ["generated_tokens", *(each for word in metrics_of(args) for each in TEXT_METRICS[word].names)]
    if name not in known:
        raise ValueError(
            f"--metric_for_best_model {name} is none of the metrics of --task {args.task} ({', '.join(known)}); give "
            "one of them"
        )
    if args.greater_is_better is None:
        args.greater_is_better = not name.endswith("loss")
        if args.greater_is_better and name in SMALLER_IS_BETTER:
            raise ValueError(
                f"--metric_for_best_model {name} is better where it is less, and as in transformers the greatest value "
                "of all but losses would be taken as the best; give --greater_is_better false"
            )


def _asked(args: argparse.Namespace) -> str | None:
    """The flag that asks for the best evaluation; None if none does."""
    if args.load_best_model_at_end:
        return "--load_best_model_at_end"
    if args.save_strategy == "best":
        return "--save_strategy best"
    return None if args.early_stopping_patience is None else "--early_stopping_patience"


def require_evaluated(args: argparse.Namespace) -> None:
    """Raise ValueError if a checkpoint of --load_best_model_at_end would be written without an evaluation.

    `args`: with whole numbers of batches.
    """
    if args.load_best_model_at_end and args.eval_steps and args.save_steps % args.eval_steps:
        raise ValueError(
            f"--load_best_model_at_end loads a checkpoint that was evaluated, and --save_steps {args.save_steps} is no "
            f"multiple of --eval_steps {args.eval_steps}; give one, or --save_strategy best"
        )


_STATE = ("value", "checkpoint", "saved_value", "without")


@dataclass
class Best:
    """The best evaluation so far.

    Attributes:
        metric: the name of the metric.
        greater: whether a greater value is better.
        patience: the number of evaluations without an improvement after which the run ends; None: it does not.
        threshold: the amount that an improvement has to exceed.
        value: the metric of the best evaluation; None before the first.
        checkpoint: the name of the best checkpoint's folder; None if there is none.
        saved_value: the metric at that checkpoint; a later, better evaluation may have had no checkpoint.
        without: number of evaluations since the last improvement.
    """

    metric: str
    greater: bool
    patience: int | None = None
    threshold: float = 0.0
    value: float | None = None
    checkpoint: str | None = None
    saved_value: float | None = None
    without: int = 0

    @staticmethod
    def of(args: argparse.Namespace) -> Best | None:
        """The rule that the flags describe; None if they ask for none."""
        if _asked(args) is None:
            return None
        threshold = args.early_stopping_threshold or 0.0
        return Best(args.metric_for_best_model, args.greater_is_better, args.early_stopping_patience, threshold)

    def judge(self, found: Mapping[str, float]) -> bool:
        """Note an evaluation, and return whether it is the best. An evaluation without the metric counts as NaN.

        Raises ValueError if the first evaluation lacks the metric.
        """
        if self.metric not in found and self.value is None:
            raise ValueError(
                f"--metric_for_best_model {self.metric} is none of an evaluation's metrics ({', '.join(found)}); give "
                "one of them"
            )
        value, best = found.get(self.metric, math.nan), self.value
        if best is None:
            best = -math.inf if self.greater else math.inf
        is_best = value > best if self.greater else value < best
        self.without = 0 if self.value is None or (is_best and abs(value - best) > self.threshold) else self.without + 1
        self.value = value if is_best else best
        return is_best

    def saved_as(self, checkpoint: str) -> None:
        """Note the checkpoint that was written right after the best evaluation."""
        self.checkpoint, self.saved_value = checkpoint, self.value

    def verdict(self) -> str:
        """A sentence that says which checkpoint is the best."""
        if self.checkpoint is None:
            why = (
                f"{self.metric} was never a number" if self.value is None or math.isinf(self.value)
                else f"no checkpoint was written after the best evaluation ({self.metric} {self.value:.4f})"
            )  # fmt: skip
            return f"no checkpoint is the best ({why}): the model is the last"
        found = f"the best is {self.checkpoint}, with {self.metric} {self.saved_value:.4f}"
        if self.value == self.saved_value:
            return found
        return f"{found}; an evaluation with {self.value:.4f} was better, and no checkpoint was written after it"

    @property
    def ends(self) -> bool:
        """Whether the run has not improved for too long."""
        return self.patience is not None and self.without >= self.patience

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {name: getattr(self, name) for name in ("metric", *_STATE)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the `state` of a checkpoint, if it is of the same metric."""
        if state["metric"] == self.metric:
            for name in _STATE:
                setattr(self, name, state[name])
