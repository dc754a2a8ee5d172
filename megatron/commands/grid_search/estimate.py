"""Predict given configurations: seconds of an iteration, MFU, memory of each stage and whether it fits.

    python tools/grid_search.py estimate --entries measurements.json --json
    python tools/grid_search.py estimate --entries mine.json --model llama-3.1-8b --seq-length 8192

Prints one line for each entry, with its id. One that says too little, or asks for what is not modelled, has the reason
instead. `under pressure`: ranks are slowed for want of memory, as the seconds say, or the verdict is borderline.
`80%`: between which seconds 80% of the published runs of its kind were; docs/planner.md says of which.
"""

import argparse
import json
from collections.abc import Callable, Mapping

from pydantic import ValidationError

from megatron.commands.grid_search import note_unread
from megatron.commands.grid_search.model_config import (
    ConfiguredModel,
    add_configured_arguments,
    read_configured,
    refuse_several_models,
)
from megatron.documents.command_line import add_flags
from megatron.documents.flag_types import count
from megatron.documents.tables import print_table
from megatron.planner import Architecture
from megatron.planner.memory.memory import GIB
from megatron.planner.published.entries import REMARKS, Entry, Unpredictable, load_entries
from megatron.planner.published.entry_parts import ModelRecord
from megatron.planner.published.interval import LEVEL, Interval, Intervals, NotValidated, interval_record, interval_text
from megatron.planner.published.prediction import Prediction, predict
from megatron.planner.time.calibration import DEFAULT_NAME, Constants, load_calibration

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
        platform = Platform(is_cuda=True, has_transformer_engine=True, has_apex=True, has_deep_ep=True)
        shape = Job.read(argv, architecture=configured.architecture, platform=platform).shape(tensor)
        for taken in (f"the model of {self.name}", *configured.notes):
            assume(taken)
        return shape


def read_entries(options: argparse.Namespace) -> list[Entry | Unpredictable]:
    """The entries of --entries, with the model that the command line gives. Raises ValueError if a file is wrong."""
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
            return entry  # the length is invalid, which reading the entry reports
        return {**entry, "model": model}

    found = load_entries(options.entries, filled=filled)
    if not num_filled:
        raise ValueError(
            f"{given} is for entries without a model, and each of {options.entries} has its own; leave one of them out"
        )
    return found


def _length_alone(entry: object) -> Mapping | None:
    """The part `model` of an entry if it describes no model; None if it describes one, or is no mapping."""
    model = (entry.get("model") or {}) if isinstance(entry, Mapping) else None
    if not isinstance(model, Mapping):
        return None
    said = {key: value for key, value in model.items() if value is not None}
    return said if said.keys() <= _SAYS_NO_MODEL else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, ("--entries", str, "FILE", "configurations, as in docs/planner.md", {"required": True}))
    model = parser.add_argument_group("model", "The model of entries that describe none.")
    add_configured_arguments(model)
    add_flags(model, ("--seq-length", count, "N", "sequence length of entries without model.seq"))
    add_flags(
        parser,
        ("--calibrated-on", str, "NAME", "calibration, or its file (default: %(default)s)", {"default": DEFAULT_NAME}),
        ("--residuals", str, "FILE", "residuals of other constants, written by validate --write-residuals"),
        ("--simulate", None, None, "simulate the programs even where there is a closed form"),
        ("--json", None, None, "print one JSON object per line"),
    )


def run(options: argparse.Namespace) -> int:
    calibration = load_calibration(options.calibrated_on)
    results = [_predict(entry, calibration.fitted, simulate=options.simulate) for entry in read_entries(options)]
    intervals = Intervals.of_calibration(calibration.name, calibration.constants, options.residuals)
    predicted = [each for each in results if isinstance(each, Prediction)]
    note_unread([each.entry for each in predicted])
    if options.json:
        for result in results:
            print(json.dumps(_as_dict(result, intervals) | {"calibrated_on": calibration.name}))
        return 0
    print_table(
        ("entry", "seconds", f"{LEVEL:.0%}", "measured", "MFU", "bubble", "GiB", "verdict", ""),
        [_cells(each, intervals) for each in predicted],
        right=(1, 2, 3, 4, 5, 6),
    )
    accuracies = [(each.entry.id, _accuracy(each, intervals)) for each in predicted]
    unknown = [(name, each.reason) for name, each in accuracies if isinstance(each, NotValidated)]
    assumed = [(each.entry.id, "; ".join(each.entry.assumed)) for each in predicted if each.entry.assumed]
    reasons = [(each.id, each.reason) for each in results if isinstance(each, Unpredictable)]
    for what, rows in (
        ("not validated:", unknown), ("assumed where the entry does not say:", assumed),
        ("cannot be predicted, because", reasons),
    ):  # fmt: skip
        if rows:
            print()
            print_table(("entry", what), rows)
    return 0


def _predict(entry: Entry | Unpredictable, constants: Constants, *, simulate: bool) -> Prediction | Unpredictable:
    if isinstance(entry, Unpredictable):
        return entry
    try:
        return predict(entry, constants, simulate=simulate)
    except ValueError as error:
        return Unpredictable(entry.id, str(error))


def _accuracy(result: Prediction, intervals: Intervals) -> Interval | NotValidated:
    entry = result.entry
    return intervals.of(result.estimate, entry.model, entry.cluster, entry.software)


def _as_dict(result: Prediction | Unpredictable, intervals: Intervals) -> dict:
    if isinstance(result, Unpredictable):
        return {"id": result.id, "reason": result.reason}
    estimate, entry = result.estimate, result.entry
    return {
        "id": entry.id,
        "iteration_seconds": estimate.seconds,
        **interval_record(_accuracy(result, intervals), estimate.seconds),
        "mfu": estimate.mfu,
        "sequences_per_second": entry.configuration.global_batch_size / estimate.seconds,
        "bubble": estimate.bubble,
        "forward_seconds": result.forward,
        "backward_seconds": result.backward,
        "memory_gib": [rank.total / GIB for rank in estimate.memory],
        "verdict": estimate.verdict.word,
        "fits": estimate.verdict.fits,
        "stage": estimate.verdict.rank,
        "spare_gib": estimate.verdict.spare_gib,
        "under_pressure": estimate.under_pressure,
        "assumed": list(entry.assumed),
        "unread": list(entry.unread),
    }


def _cells(result: Prediction, intervals: Intervals) -> tuple[str, ...]:
    estimate, entry = result.estimate, result.entry
    return (
        entry.id,
        f"{estimate.seconds:.4g}",
        interval_text(_accuracy(result, intervals), estimate.seconds),
        f"{entry.seconds:.4g}" if entry.seconds is not None else "",
        f"{100 * estimate.mfu:.1f}%",
        f"{100 * estimate.bubble:.1f}%",
        f"{estimate.memory_gib:.1f}",
        describe_verdict(estimate.verdict),
        "under pressure" if estimate.under_pressure else "",
    )


def describe_verdict(verdict: object) -> str:
    """A verdict in words: `fits`, or the stage and the GiB that it misses."""
    if verdict.fits:
        return verdict.word
    return f"{verdict.word}: stage {verdict.rank} misses {-verdict.spare_gib:.1f} GiB"
