"""The flags of texts that evaluations generate, with transformers' names, and the checks that need no model."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from megatron.documents.flag_types import count
from megatron.finetuning.data.text_metrics import TEXT_METRICS

GENERATES = ("text-to-text", "chat")
"""The tasks with prompts."""

PREDICTIONS = "generated_predictions.jsonl"
"""The file of generated texts in --output_dir, with the name of transformers' example scripts."""

OTHERS = ("max_new_tokens", "generation_max_length", "num_beams", "generation_metrics", "predictions_file")
"""The flags that describe a generation."""


def add_generation(add: Callable[..., argparse.Action]) -> None:
    """Add the flags. `add`: the `add_argument` of a parser or of a group."""
    add("--predict_with_generate", action="store_true",
        help="evaluations generate an answer to each prompt (text-to-text, chat)")  # fmt: skip
    add("--max_new_tokens", type=count, metavar="N", help="most tokens of an answer; none: --max_target_length")
    add("--generation_max_length", type=count, metavar="N",
        help="the same, with the prompt counted (chat), or the decoder's first token (text-to-text)")  # fmt: skip
    add("--num_beams", type=count, metavar="N", help="1, as each answer takes the most likely token at each place")
    add("--generation_metrics", nargs="+", choices=TEXT_METRICS, help="how answers are compared; none: exact_match")
    add("--predictions_file", metavar="FILE", help=f"prompts and answers, JSONL; none: OUTPUT_DIR/{PREDICTIONS}")


def validate_generation(args: argparse.Namespace) -> None:
    """Check the flags. Raises ValueError, with the remedy, for flags that contradict each other."""
    if not args.predict_with_generate:
        given = [name for name in OTHERS if getattr(args, name) is not None]
        if given:
            raise ValueError(f"--{given[0]} is for --predict_with_generate; give it, too, or leave --{given[0]} out")
        return
    if args.task not in GENERATES:
        remedy = "give --task chat with prompts and completions" if args.task == "causal-lm" else "leave it out"
        raise ValueError(f"--predict_with_generate needs prompts, and --task {args.task} has none; {remedy}")
    if not (args.do_eval or args.dry_run):
        raise ValueError("--predict_with_generate is for evaluations; give --validation_file and --do_eval")
    if args.num_beams not in (None, 1):
        raise ValueError(
            f"--num_beams {args.num_beams} searches, and evaluations take the most likely token at each place; give 1, "
            "or load the model that the run writes with transformers"
        )
    if args.max_new_tokens is not None and args.generation_max_length is not None:
        raise ValueError("--max_new_tokens and --generation_max_length both say where an answer ends; leave one out")
    _require_room(args)
    for name in metrics_of(args):
        package = TEXT_METRICS[name].package
        if package is not None and find_spec(package) is None:
            raise ValueError(
                f"--generation_metrics {name} needs the package {package}; pip install .[generation], or leave {name} "
                "out"
            )


def _require_room(args: argparse.Namespace) -> None:
    """Check that the longest answer fits into a row. Raises ValueError otherwise."""
    has_encoder = args.task == "text-to-text"
    row = "max_target_length" if has_encoder else "max_seq_length"
    room = getattr(args, row)
    for name, most in (("max_new_tokens", room - (not has_encoder)), ("generation_max_length", room + has_encoder)):
        given = getattr(args, name)
        if given is not None and given > most:
            raise ValueError(
                f"--{name} {given} is more than the {most} for which rows have room; give less, or a larger --{row}"
            )


def metrics_of(args: argparse.Namespace) -> list[str]:
    """The names of the metrics, each once."""
    return list(dict.fromkeys(args.generation_metrics or ["exact_match"]))


def predictions_of(args: argparse.Namespace) -> Path | None:
    """The file of generated texts; None if there is nowhere to write it."""
    if args.predictions_file is not None:
        return Path(args.predictions_file)
    return None if args.output_dir is None else Path(args.output_dir) / PREDICTIONS
