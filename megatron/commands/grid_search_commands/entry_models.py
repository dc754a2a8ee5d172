"""A model of the command line for the entries of a file that have none: `--model` and `--model-config` of `estimate`.

An entry without a model, or with one that says no more than the length of sequences, takes the one given;
`--seq-length` is for those that do not say it. An entry that describes a model keeps it.
"""

import argparse
from collections.abc import Callable, Mapping

from pydantic import ValidationError

from megatron.commands.grid_search_commands.model_config import ConfiguredModel, read_configured, refuse_several_models
from megatron.planner import Architecture
from megatron.planner.published.entries import REMARKS, Entry, Unpredictable, load_entries
from megatron.planner.published.entry_model import ModelRecord

_SAYS_NO_MODEL = {"seq", *REMARKS}


class _GivenModel(ModelRecord):
    """The part `model` of an entry that says at most `seq`. `read`: the model, for sequences of that length."""

    read: Callable[[int], ConfiguredModel]

    def architecture(self, tensor: int, assume: Callable[[str], None]) -> Architecture:
        from megatron.trainer.arguments import Platform
        from megatron.trainer.plan.command import Job  # most files of entries need no training program

        if self.seq is None:
            raise ValueError("model.seq is not given; give it, or --seq-length for all entries")
        configured = self.read(self.seq)
        argv = [*configured.argv, "--seq-length", str(self.seq)]
        platform = Platform(is_cuda=True, has_transformer_engine=True, has_apex=True)  # no shape depends on it
        shape = Job.read(argv, architecture=configured.architecture, platform=platform).shape(tensor)
        for taken in (f"the model of {self.name}", *configured.notes):
            assume(taken)
        return shape


def read_entries(options: argparse.Namespace) -> list[Entry | Unpredictable]:
    """The entries of --entries, with the model that the command line gives. Raises ValueError."""
    refuse_several_models(options)
    if read_configured(options, sequence_length=1) is None:
        if options.seq_length is not None:
            raise ValueError(
                f"--seq-length {options.seq_length} goes with --model or --model-config; entries with models of their "
                "own say model.seq"
            )
        return load_entries(options.entries)
    given = f"--model {options.model}" if options.model is not None else f"--model-config {options.model_config}"
    num_filled = 0

    def filled(entry: object) -> object:
        nonlocal num_filled
        said = _length_alone(entry)
        if said is None:
            return entry
        num_filled += 1
        try:
            model = _GivenModel(
                name=given, seq=said.get("seq", options.seq_length),
                read=lambda length: read_configured(options, sequence_length=length),
            )  # fmt: skip
        except ValidationError:
            return entry  # of a length that is none, as reading the entry says
        return {**entry, "model": model}

    found = load_entries(options.entries, filled=filled)
    if not num_filled:
        raise ValueError(
            f"{given} is for entries without a model, and each of {options.entries} has its own; leave one of them out"
        )
    return found


def _length_alone(entry: object) -> Mapping | None:
    """The part `model` of an entry that describes none; None: it does, or it is no such part."""
    model = (entry.get("model") or {}) if isinstance(entry, Mapping) else None
    if not isinstance(model, Mapping):
        return None
    said = {key: value for key, value in model.items() if value is not None}
    return said if said.keys() <= _SAYS_NO_MODEL else None
