"""Fit the constants of the time model to measured runs, and write a calibration that the other commands take.

    python tools/grid_search.py calibrate --entries measurements.json --source BPipe --output mine.json
    python tools/grid_search.py estimate --entries others.json --calibrated-on mine.json

    python tools/grid_search.py calibrate --profile profile.json --gpu A100-80 --output mine.json

Robust least squares on the logarithms of the times. Runs that no constants explain together with the others are left
aside and named.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from megatron.commands.grid_search import note_unread
from megatron.documents import command_line
from megatron.documents.tables import print_table
from megatron.planner.job.devices import DEVICES
from megatron.planner.published.entries import Entry, load_entries
from megatron.planner.published.prediction import ConstantsFit, fit_entries, fit_profile, is_timed
from megatron.planner.time.calibration import FITTED, Calibration, constants_as_dict

_MUCH = 0.1
_LIMIT = 0.999


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measured = parser.add_mutually_exclusive_group(required=True)
    measured.add_argument("--entries", metavar="FILE", help="measured runs")
    measured.add_argument("--profile", metavar="FILE", help="stages that tools/profile_model.py has timed")
    parser.add_argument("--gpu", metavar="NAME", help="with --profile: the processor it was taken on, as in a cluster")
    parser.add_argument("--source", default="", metavar="TEXT", help="only runs whose source contains this")
    parser.add_argument("--model", default="", metavar="TEXT", help="only runs whose model's name contains this")
    parser.add_argument("--iterations", action="store_true", help="only whole iterations, not single stages")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="the calibration; its name is that")
    parser.add_argument("--about", default="", metavar="TEXT", help="what was measured where")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(options: argparse.Namespace) -> int:
    _refuse_what_does_not_go_together(options)
    command_line.require_file(options.output)
    fit = _of_profile(options) if options.profile else _of_entries(options)
    calibration = calibration_of(fit, name=options.output.stem, about=options.about or _about(options))
    calibration.save(options.output)
    for doubt in doubts(fit):
        print(f"warning: {doubt}", file=sys.stderr)
    if options.json:
        print(json.dumps(calibration.model_dump() | {"errors": fit.errors}))
        return 0
    values = constants_as_dict(fit.constants)
    print_table(
        ("constant", "value", ""),
        [(name, f"{value:.4g}", "fitted" if name in FITTED else "") for name, value in values.items()],
        right=(1,),
    )
    explained = len(fit.errors) - len(fit.unexplained)
    print(f"\n{explained} of {len(fit.errors)} runs are explained, with a mean error of {100 * fit.mean_error:.2f}%")
    for name in fit.unexplained:
        print(f"not explained: {name}, predicted {100 * fit.errors[name]:+.1f}%")
    print(f"Calibration: {options.output}")
    return 0


def doubts(fit: ConstantsFit) -> Iterator[str]:
    """The reasons to doubt a fit, one sentence each."""
    if fit.mean_error > _MUCH:
        yield (
            f"even the explained runs are {100 * fit.mean_error:.0f}% off on average: the time model does "
            "not describe them; measure on a quieter machine, or larger models, or predict from the profile itself "
            "(search --predict-from)"
        )
    for name in FITTED:
        if name.endswith("efficiency") and getattr(fit.constants, name) > _LIMIT:
            yield f"{name} is at its limit of 1: the processor is faster than its data sheet says, or is another one"


def _refuse_what_does_not_go_together(options: argparse.Namespace) -> None:
    known = (*DEVICES, "cpu")
    if options.profile and options.gpu not in known:
        given = f"{options.gpu!r} is no GPU that is known" if options.gpu else "--profile needs --gpu"
        raise ValueError(f"{given}; give one of {', '.join(known)}")
    if options.entries and options.gpu:
        raise ValueError(f"--gpu {options.gpu} goes with --profile; entries name their own")
    if options.profile and (options.source or options.model or options.iterations):
        raise ValueError("--source, --model and --iterations choose among --entries; a profile is fitted as a whole")


def _of_entries(options: argparse.Namespace) -> ConstantsFit:
    entries = [
        entry
        for entry in load_entries(options.entries)
        if isinstance(entry, Entry) and options.source in entry.source and options.model in entry.model_name
    ]
    note_unread(entries)
    timed = [entry for entry in entries if is_timed(entry) and (entry.seconds is not None or not options.iterations)]
    return fit_entries(timed)


def _of_profile(options: argparse.Namespace) -> ConstantsFit:
    from megatron.planner.time.profile import load_profile

    return fit_profile(load_profile(options.profile), options.gpu)


def calibration_of(fit: ConstantsFit, *, name: str, about: str) -> Calibration:
    """The calibration that a fit gives, with today's date."""
    return Calibration(
        name=name,
        about=about,
        date=date.today().isoformat(),
        entries=tuple(fit.errors),
        unexplained={name: round(fit.errors[name], 4) for name in fit.unexplained},
        mean_error=round(fit.mean_error, 5),
        constants={name: float(f"{value:.5g}") for name, value in constants_as_dict(fit.constants).items()},
    )


def _about(options: argparse.Namespace) -> str:
    if options.profile:
        return f"{options.profile}, on {options.gpu}"
    return ", ".join(filter(None, (options.entries, options.source, options.model)))
