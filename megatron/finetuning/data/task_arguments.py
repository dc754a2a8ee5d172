"""The flags of single tasks and of the model's attention, and the checks that need no data."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from megatron.documents.flag_types import within

PREFERENCE = "dpo"
"""The task of direct preference optimization (DPO)."""

CHATS = ("chat", "image-text-to-text")
"""The tasks whose samples are conversations."""

SOUND = ("audio-classification", "ctc", "speech-to-text")
"""The tasks of sound."""

HEADS = (
    "sequence-classification", "multiple-choice", "regression", "token-classification", "question-answering",
    "image-classification", "audio-classification", "ctc",
)  # fmt: skip
"""The tasks whose models have a head that may be new."""

TASKS_OF_FLAG = {
    "ignore_mismatched_sizes": HEADS,
    "mlm_probability": ("masked-lm",),
    "whole_word_mask": ("masked-lm",),
    "audio_column": SOUND,
    "max_seconds": SOUND,
    "messages_column": CHATS,
    "chat_template": (*CHATS, PREFERENCE),
    "train_on_prompt": CHATS,
    **dict.fromkeys(("chosen_column", "rejected_column", "dpo_beta", "dpo_label_smoothing"), (PREFERENCE,)),
}
"""Flag -> the tasks that read it."""

DPO_BETA = 0.1
"""TRL's default."""
_DEFAULTS = {"dpo_beta": DPO_BETA}

MLM_PROBABILITY = 0.15
"""The share of tokens that are hidden if --mlm_probability is not given, as in transformers' examples."""


MAX_SECONDS = 10.0
"""The length of a sound if neither --max_seconds nor the feature extractor says it."""

ATTENTIONS = ("eager", "sdpa")
"""Words of --attn_implementation."""


def _attention(text: str) -> str:
    if text not in ATTENTIONS:
        raise argparse.ArgumentTypeError(
            f"stages are graphs of torch's operators, which {text!r} is not known to be; give {' or '.join(ATTENTIONS)}"
        )
    return text


def add_task(add: Callable[..., argparse.Action]) -> None:
    """Add the flags of single tasks. `add`: the `add_argument` of a parser or of a group."""
    add("--chosen_column", help="column of the preferred answer (dpo)")
    add("--rejected_column", help="column of the other answer (dpo)")
    add("--dpo_beta", type=within(1e-6), metavar="B", default=DPO_BETA,
        help="how strongly the model is held to the one that it began as (dpo)")  # fmt: skip
    add("--dpo_label_smoothing", type=within(0, most=0.5), metavar="E", default=0.0,
        help="share of pairs that are taken to be the wrong way round (dpo)")  # fmt: skip
    add("--attn_implementation", type=_attention, metavar="WORD",
        help="attention as operators (eager) or torch's kernel (sdpa); none: what transformers takes")  # fmt: skip
    add("--mlm_probability", type=within(0.001, most=1.0),
        help=f"share of the tokens that are hidden (masked-lm); {MLM_PROBABILITY}")  # fmt: skip
    add("--audio_column", help="column of the sound (audio-classification, ctc, speech-to-text)")
    add("--max_seconds", type=within(0.001),
        help=f"to which sounds are cut and padded; none: as the feature extractor, or {MAX_SECONDS:g}")  # fmt: skip
    add("--ignore_mismatched_sizes", action="store_true",
        help="a head of other classes than the data's begins at random, as a missing one does")  # fmt: skip
    add("--whole_word_mask", action="store_true", help="all tokens of a word are hidden, or none (masked-lm)")


def validate_task(args: argparse.Namespace) -> None:
    """Raise ValueError for a flag that --task does not read, and for an evaluation of dpo that has no reference."""
    for name, tasks in TASKS_OF_FLAG.items():
        if getattr(args, name) not in (None, 0, _DEFAULTS.get(name)) and args.task not in tasks:
            raise ValueError(f"--{name} is for --task {', '.join(tasks)}, and --task is {args.task}; leave it out")
    if args.task == PREFERENCE and not (args.do_train or args.dry_run or args.resume_from_checkpoint):
        raise ValueError(
            "--do_eval alone with --task dpo compares a model with itself, since rewards are relative to where a run "
            "began; give --resume_from_checkpoint, too"
        )
