"""When a run evaluates and saves on its way, in the words of Hugging Face's trainer and with their meaning.

`--eval_strategy` and `--save_strategy` say `no`, `steps` (each --eval_steps, --save_steps) or `epoch`. Without one,
a number of steps alone means `steps`.
"""

from __future__ import annotations

import argparse
import math

STRATEGIES = ("no", "steps", "epoch")
SAVE_STEPS = 500
"""Batches between two checkpoints where `--save_strategy steps` stands alone, as in transformers."""


def strategy(text: str) -> str:
    """The strategy that a flag names. Raises ArgumentTypeError for a word that is none."""
    if text == "best":
        raise argparse.ArgumentTypeError(
            "'best' keeps the best evaluation, which is not done here; give steps or epoch"
        )
    if text not in STRATEGIES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(STRATEGIES)}")
    return text


def steps(text: str) -> float:
    """Batches, or below 1 a part of all. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf or (value > 1 and not value.is_integer()):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of batches, and no part of all between 0 and 1")
    return value


def complete(args: argparse.Namespace) -> None:
    """Give both strategies a word, and `steps` a number; evaluate where a strategy asks for it. `args.notes` gets a
    sentence for each number that means nothing then.

    Raises ValueError for words that contradict each other.
    """
    if args.eval_each_epoch and args.eval_strategy not in (None, "epoch"):
        raise ValueError(f"--eval_each_epoch contradicts --eval_strategy {args.eval_strategy}; leave one out")
    if args.eval_each_epoch:
        args.eval_strategy = "epoch"
    asked = f"--eval_strategy {args.eval_strategy}" if args.eval_strategy else "--eval_steps"
    for name, default in (("eval", args.logging_steps), ("save", SAVE_STEPS)):
        given, number = getattr(args, f"{name}_strategy"), getattr(args, f"{name}_steps")
        word = given or ("steps" if number else "no")
        if number and word != "steps":
            args.notes.append(f"--{name}_steps {number:g} means nothing with --{name}_strategy {word}")
        if word == "steps" and (number is None or (number == 0 and name == "eval")):
            number = default
        setattr(args, f"{name}_strategy", word)
        setattr(args, f"{name}_steps", number if word == "steps" else 0)
    if args.eval_strategy != "no" and args.do_train and not args.do_eval:
        if args.validation_file is None:
            raise ValueError(f"{asked} has nothing to evaluate; give --validation_file, or leave it out")
        args.do_eval = True


def settle(args: argparse.Namespace, *, num_steps: int, steps_per_epoch: int) -> None:
    """Have `eval_steps` and `save_steps` be batches, 0: never on the way."""
    for name in ("eval", "save"):
        number = getattr(args, f"{name}_steps")
        if getattr(args, f"{name}_strategy") == "epoch":
            number = steps_per_epoch
        elif 0 < number < 1:
            number = math.ceil(number * num_steps)
        setattr(args, f"{name}_steps", int(number))
