"""The arguments inside a checkpoint: written, compared before anything is loaded, and taken over on request.

A checkpoint holds the run's arguments under 'args', as Megatron-LM's do. Loading weights into a model of another shape
would fail deep inside, tensor by tensor; comparing the models first (`comparison`) names what the user has to change.
"""

import argparse

import torch

from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.trainer.arguments.flags.parser import FLAGS, destinations
from megatron.trainer.arguments.flags.specification import Role
from megatron.trainer.checkpoint.comparison import (
    MODEL_ARGUMENTS,
    OTHER_NAMES,
    WITHOUT_IT,
    differences,
    parts_not_built,
)

_TAKEN_UNLESS_GIVEN = (*destinations(Role.SAVED), "padded_vocab_size")
_ARCHITECTURES = {"gpt": "GPT", "bert": "BERT", "vit": "ViT", "bert-classify": "BERT that tells classes"}
_BODIES = {"bert-classify": "bert"}  # whose weights it takes, too
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype)


def saved_arguments(args: argparse.Namespace, **position: int) -> argparse.Namespace:
    """Copy of the arguments that any program can unpickle: plain values only, paths as text; `position` overrides."""
    values = {name: value for name, value in vars(args).items() if _is_plain(value)}
    values.update({name: str(value) for name, value in vars(args).items() if hasattr(value, "__fspath__")})
    return argparse.Namespace(**{**values, **position})


def check_same_model(
    args: argparse.Namespace, saved: argparse.Namespace | None, path: object, *, body_only: bool = False
) -> None:
    """Raise CheckpointError naming the first argument in which the model to be loaded into differs from the saved one.

    What the models are is compared, not how their arguments are spelled. A switch that the checkpoint's program did not
    have yet was off; what else either side does not say is not compared. `body_only`: the heads may differ.
    """
    _check_can_be_built(args, saved, path, body_only=body_only)
    for name, here, there in differences(args, saved, body_only=body_only):
        values = f"{name} is {there!r} there and {here!r} here"
        if name == "padded_vocab_size":
            raise CheckpointError(
                f"checkpoint {path} holds a model of another vocabulary: {values}. Use the tokenizer that it was "
                "trained with, and its --make-vocab-size-divisible-by."
            )
        if name == "class_names":
            raise CheckpointError(
                f"checkpoint {path} tells other classes: {values}. Give the training data that it was trained with, or "
                "take its weights but for the head with --pretrained-checkpoint."
            )
        raise CheckpointError(
            f"checkpoint {path} holds another model: {values}. {_remedy(name, there)}, or pass --use-checkpoint-args "
            "to take the model's arguments from the checkpoint."
        )


def _remedy(name: str, value: object) -> str:
    """What to change on the command line for an argument to become `value`."""
    if name == "num_query_groups":
        return f"Pass --group-query-attention --num-query-groups {value}"
    flag = next(flag for flag in FLAGS if flag.dest == name)
    if flag.stores is None:
        return f"Pass {flag.name} {value}"
    return f"Pass {flag.name}" if value == flag.stores else f"Leave {flag.name} out"


def _check_can_be_built(
    args: argparse.Namespace, saved: argparse.Namespace | None, path: object, *, body_only: bool = False
) -> None:
    """Neither weights nor arguments of a GPT fit a BERT (Megatron-LM's checkpoints do not say which they are), and some
    of Megatron-LM's models are not built here."""
    here, there = getattr(args, "architecture", None), getattr(saved, "architecture", None)
    fits = here == there or (body_only and _BODIES.get(here) == there)
    if None not in (here, there) and not fits:
        ours, theirs = _ARCHITECTURES[here], _ARCHITECTURES[there]
        remedy = ", or take its weights but for the head with --pretrained-checkpoint" * (_BODIES.get(here) == there)
        raise CheckpointError(
            f"checkpoint {path} holds a {theirs}, and this program wants a {ours}; give it to a program for a {theirs}"
            f", or another --load{remedy}"
        )
    for name, value in parts_not_built(saved):
        raise CheckpointError(
            f"checkpoint {path} holds a model that is not built here: {name} is {value!r} there; train it with "
            "Megatron-LM, or give another --load"
        )


def what_changes(args: argparse.Namespace, saved: argparse.Namespace | None) -> list[str]:
    """What the log says of a run that goes on with other flags than it was saved with, where the weights fit."""
    return [line for line in (_other_program(args, saved), _other_samples(args, saved)) if line]


def _other_samples(args: argparse.Namespace, saved: argparse.Namespace | None) -> str | None:
    """Of a run that trains on: its position counts samples, and these stand in another order, or are others."""
    if saved is None or getattr(args, "skip_train", False):
        return None
    values = [(flag, getattr(saved, flag.dest), getattr(args, flag.dest)) for flag in FLAGS
              if Role.ORDER in flag.roles and hasattr(saved, flag.dest) and hasattr(args, flag.dest)]  # fmt: skip
    changed = [f"{flag.name} {_words(there)} (now {_words(here)})" for flag, there, here in values
               if _words(here).replace(" ", "") != _words(there).replace(" ", "")]  # fmt: skip
    if changed:
        return (
            f"was saved with {', '.join(changed)}: the samples, or their order from the first on, are others, so the "
            "run takes some twice and some never; give the former values to go on where it stopped"
        )
    there, here = _length(saved), _length(args)
    if there in (None, here):
        return None
    return (
        f"was saved by a run of {there} samples, and this run has {here}: data that a run passes through several times "
        "are shuffled over all passes together, so their order changes"
    )


def _length(args: argparse.Namespace) -> int | None:
    """Samples of the whole run, but for a ramp-up of the batch size."""
    iterations, size = getattr(args, "train_iters", None), getattr(args, "global_batch_size", None)
    return getattr(args, "train_samples", None) or (iterations and size and iterations * size)


def _words(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _other_program(args: argparse.Namespace, saved: argparse.Namespace | None) -> str | None:
    """Of a run under another pipeline program than it was saved under; that is sound: a checkpoint is a drained state,
    in which nothing of a program is under way."""
    here, there = (getattr(each, "pipeline_program_sha256", None) for each in (args, saved))
    if here == there:
        return None
    was = f"program {there[:12]}" if there else f"schedule {getattr(saved, 'pipeline_schedule', 'of Megatron-LM')}"
    goes_on = f"program {here[:12]}" if here else f"schedule {args.pipeline_schedule}"
    return f"was saved under {was}; the run goes on with {goes_on}"


def apply_saved_arguments(args: argparse.Namespace, saved: argparse.Namespace | None, path: object) -> None:
    """--use-checkpoint-args: set the model's arguments to the saved ones.

    What decides the shape always comes from the checkpoint, also that its program did not have a switch yet. The rest
    of the model's arguments, and the tokenizer's, keep the values that the command line names (`args.given`).
    """
    if saved is None:
        raise CheckpointError(
            f"checkpoint {path} holds no arguments, so --use-checkpoint-args has nothing to take over"
        )
    _check_can_be_built(args, saved, path)
    for name in (*MODEL_ARGUMENTS, *_TAKEN_UNLESS_GIVEN):
        their_name = name if hasattr(saved, name) else OTHER_NAMES.get(name, name)
        if hasattr(saved, their_name) and (name in MODEL_ARGUMENTS or name not in args.given):
            setattr(args, name, getattr(saved, their_name))
        elif name in MODEL_ARGUMENTS and name in WITHOUT_IT:
            setattr(args, name, WITHOUT_IT[name])


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return type(value) is dict and all(_is_plain(item) for pair in value.items() for item in pair)
    return type(value) in _PLAIN
