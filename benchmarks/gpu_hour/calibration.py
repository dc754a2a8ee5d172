"""Iterations of one rank, predicted from a profile of this card and from its data sheet, beside measured ones.

    python -m benchmarks.gpu_hour.calibration --json calibration.json

For each shape (hidden size, sequence length) profiles and runs alternate: the blocks are profiled with
tools/profile_model.py's session, runs of several depths and microbatches are trained as pretrain_gpt.py trains them,
the blocks are profiled again, and so on. Each run is predicted from the profile before it (`grid_search.py search
--predict-from`), and from the data sheet with the package's constants and with constants that are fitted to the
profiles (`--calibrated-on`). Errors are predicted over measured seconds, less 1.

Beside FILE, in a folder of its name, lie the profiles, the fitted calibration and the runs as measured entries, in the
forms that `tools/grid_search.py` takes; FILE holds all of them, too.

Row of the table: calibration, 525 s at most, about 330 s, needs CUDA.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.common.tables import spread
from benchmarks.gpu_hour.result import Result, parser_of
from benchmarks.gpu_hour.trained import Size, Tasks, first_line, iteration_seconds, num_cores, prepare_environment
from megatron import backend
from megatron.commands.grid_search.calibrate import calibration_of, doubts
from megatron.commands.grid_search.trial_results import predicted_seconds
from megatron.documents.files import write_whole
from megatron.pipeline.program.weight_policies import FLUSH
from megatron.planner import Cluster, Configuration, Planner
from megatron.planner.job.devices import known_device
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.published.prediction import ConstantsFit, fit_profiles
from megatron.planner.time.calibration import Constants, default_constants
from megatron.planner.time.first_principles import FirstPrinciples
from megatron.planner.time.profile import Profile
from megatron.trainer.arguments.platform import assumed_platform
from megatron.trainer.plan.command import Job, model_argv
from megatron.trainer.profile.session import ProfilingSession


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        shapes: models, of which the depth and the microbatch do not count.
        depths, micro_batches: those of the runs, each with each.
        profiled_layers: the two numbers of layers of the profile's stages.
        profiled: microbatches of each block in a profile.
        warmup, iterations: of each run.
        threads: of the operators on the CPU.
    """

    shapes: Sequence[Size]
    depths: Sequence[int]
    micro_batches: Sequence[int]
    profiled_layers: tuple[int, int]
    profiled: int
    warmup: int
    iterations: int
    rounds: int
    threads: int


CARD = Plan(
    shapes=(
        Size(layers=1, hidden=4096, heads=32, sequence=2048, microbatches=4),
        Size(layers=1, hidden=2048, heads=16, sequence=1024, microbatches=4),
    ),
    depths=(6, 14), micro_batches=(1, 4), profiled_layers=(1, 3), profiled=32, warmup=2, iterations=6, rounds=2,
    threads=num_cores(),
)  # fmt: skip
REHEARSAL = Plan(
    shapes=(Size(layers=1, hidden=32, heads=2, sequence=128, microbatches=2, vocabulary=64),),
    depths=(2,), micro_batches=(1,), profiled_layers=(1, 2), profiled=8, warmup=1, iterations=3, rounds=1,
    threads=1,
)  # fmt: skip


@dataclass
class Case:
    """A run with its seconds of an iteration in each round. `predicted`: by what predicts."""

    size: Size
    measured: list[float] = field(default_factory=list)
    predicted: dict[str, list[float]] = field(default_factory=dict)
    failed: str | None = None

    @property
    def name(self) -> str:
        return f"{shape_name(self.size)}, {self.size.layers} layers, microbatches of {self.size.micro_batch}"

    @property
    def configuration(self) -> Configuration:
        size = self.size
        return Configuration(
            micro_batch_size=size.micro_batch, global_batch_size=size.micro_batch * size.microbatches,
            recompute=RecomputeScope.NONE, schedule="flush",
        )  # fmt: skip

    def errors(self, by: str) -> list[float]:
        """Of each round; positive if the prediction is too long."""
        return [each / seconds - 1 for each, seconds in zip(self.predicted[by], self.measured, strict=True)]


PROFILE, DATA_SHEET, FITTED = "profile", "data sheet", "fitted constants"


def shape_name(size: Size) -> str:
    return f"h{size.hidden} s{size.sequence}"


def profiled(shape: Size, plan: Plan, tasks: Tasks) -> Profile:
    """Profile the blocks of a shape. Raises ValueError if one cannot be measured."""
    session = ProfilingSession(
        architecture="gpt", argv=model_argv(shape.argv(), architecture="gpt"), sequence_parallel=False, processes=1,
        threads=plan.threads, tensors=(1,), micro_batch_sizes=tuple(plan.micro_batches), scopes=(RecomputeScope.NONE,),
        weights=(FLUSH,), layers=plan.profiled_layers, iterations=plan.profiled, rounds=1,
    )  # fmt: skip
    try:
        return session.run(lambda *what: print(*what, file=sys.stderr, flush=True), pool=tasks.pool)
    except ValueError:
        tasks.renew()
        raise


def job_of(size: Size) -> Job:
    return Job.read(size.model_argv(), architecture="gpt", platform=assumed_platform(["none"]))


def gpu_of(profile: Profile) -> str | None:
    """The planner's name of the processor; None: it knows no such GPU."""
    return "cpu" if profile.shares_processor else known_device(profile.machine.device)


def from_data_sheet(case: Case, gpu: str, constants: Constants) -> float:
    """Seconds of an iteration by first principles."""
    job = job_of(case.size)
    shape = replace(job.shape(1), num_layers=case.size.layers)
    cluster = Cluster(gpu=gpu, nodes=1, gpus_per_node=1)
    costs = FirstPrinciples(shape, cluster, job.software, constants)
    return Planner(shape, cluster, costs, job.software).estimate(case.configuration, simulate=True).seconds


# --- rounds -----------------------------------------------------------------------------------------------------------


def measure(plan: Plan, tasks: Tasks, result: Result) -> Iterator[tuple[dict[str, Profile], list[Case]]]:
    """Measure shape by shape. Yields what there is after each round: the newest profiles by shape, and all cases."""
    profiles: dict[str, Profile] = {}
    cases: list[Case] = []
    for shape in plan.shapes:
        own = [Case(replace(shape, layers=layers, micro_batch=micro_batch))
               for layers in plan.depths for micro_batch in plan.micro_batches]  # fmt: skip
        cases += own
        for _ in range(plan.rounds):
            try:
                profile = profiles[shape_name(shape)] = profiled(shape, plan, tasks)
            except ValueError as error:
                result.add(f"{shape_name(shape)} cannot be profiled: {first_line(error)}")
                break
            for case in own:
                run(case, profile, plan, tasks, result)
            yield profiles, cases


def run(case: Case, profile: Profile, plan: Plan, tasks: Tasks, result: Result) -> None:
    """Train a case, and note its seconds and those that the profile predicts.

    A case that failed is left out, and so is a round whose profile has a difference below zero (a busy machine).
    """
    if case.failed is not None:
        return
    found = tasks.do(iteration_seconds, argv=case.size.argv(), warmup=plan.warmup, iterations=plan.iterations)
    if "failed" in found:
        case.failed = found["failed"]
        result.add(f"{case.name}: {'out of memory' if found.get('out_of_memory') else 'failed'}: {case.failed}")
        return
    try:
        seconds = predicted_seconds(profile, case.configuration, num_layers=case.size.layers)
    except ValueError as error:
        result.add(f"{case.name} is not predicted from this profile: {first_line(error)}")
        return
    case.predicted.setdefault(PROFILE, []).append(seconds)
    case.measured.append(statistics.median(found["seconds"]))


# --- what the rounds come to ------------------------------------------------------------------------------------------


def fitted(profiles: dict[str, Profile], gpu: str, software: Any) -> ConstantsFit:
    return fit_profiles(profiles, gpu, software=software)


def add_predictions(cases: Sequence[Case], by: str, gpu: str, constants: Constants) -> None:
    for case in cases:
        if case.measured:
            case.predicted[by] = [from_data_sheet(case, gpu, constants)] * len(case.measured)


def errors_of(cases: Sequence[Case], by: str) -> list[float]:
    """The median error of each case."""
    return [statistics.median(case.errors(by)) for case in cases if case.predicted.get(by)]


def add_cases(cases: Sequence[Case], result: Result) -> None:
    """A line for each case that ran, and one for each kind of prediction."""
    for number, case in enumerate(cases):
        if not case.measured:
            continue
        said = ", ".join(
            f"{by} {statistics.median(seconds):.4g} s ({statistics.median(case.errors(by)):+.1%})"
            for by, seconds in case.predicted.items()
        )
        result.add(
            f"{case.name}: {spread(case.measured, 4)} s measured; predicted from {said}",
            **{f"case{number}_measured_seconds": case.measured},
            **{f"case{number}_{by.replace(' ', '_')}_seconds": seconds for by, seconds in case.predicted.items()},
        )
    for by in (PROFILE, DATA_SHEET, FITTED):
        if found := errors_of(cases, by):
            mean, worst = statistics.fmean(map(abs, found)), max(found, key=abs)
            result.add(
                f"Predicted from {by}: off by {mean:.1%} in the mean of {len(found)} runs, {worst:+.1%} at most",
                **{f"{by.replace(' ', '_')}_errors_ratio": found},
            )


def entries_of(cases: Sequence[Case], profile: Profile) -> dict:
    """The runs as measured entries (docs/planner.md), for `calibrate --entries` and `validate --entries`."""
    return {
        "about": f"{profile.machine.device}, torch {profile.machine.torch}, plain layers without fused kernels",
        "entries": [
            {
                "id": case.name, "source": "gpu_hour",
                "model": {
                    "layers": case.size.layers, "hidden": case.size.hidden, "heads": case.size.heads,
                    "seq": case.size.sequence, "vocab": case.size.vocabulary, "tied_embeddings": False,
                },
                "hardware": {"gpu": profile.machine.device, "gpus": 1},
                "config": {
                    "framework": "Megatron-Core", "precision": "bf16", "flash_attention": False, "schedule": "flush",
                    "micro_batch": case.size.micro_batch, "recompute": "none", "p": 1,
                    "global_batch": case.size.micro_batch * case.size.microbatches,
                },
                "measured": {"iteration_s": statistics.median(case.measured)},
                "fused_softmax_kernel_available": False,
            }
            for case in cases
            if case.measured
        ],
    }  # fmt: skip


def keep(profiles: dict[str, Profile], cases: Sequence[Case], result: Result, folder: Path) -> None:
    """Fit what can be fitted, and write the files, anew after each round."""
    newest = next(reversed(profiles.values()))
    gpu, content = gpu_of(newest), result.content
    for name, profile in profiles.items():
        profile.save(folder / f"profile_{name.replace(' ', '_')}.json")
    content["card"], content["torch"] = newest.machine.device, newest.machine.torch
    content["profiles"] = {name: profile.model_dump(mode="json") for name, profile in profiles.items()}
    content["entries"] = entries_of(cases, newest)
    write_whole(folder / "entries.json", json.dumps(content["entries"], indent=1) + "\n")
    if gpu is None:
        content["not_fitted"] = f"the planner has no data sheet of {newest.machine.device}"
    else:
        fit = fitted(profiles, gpu, job_of(cases[0].size).software)
        calibration = calibration_of(
            fit, name=gpu.lower(), about=f"profiles of one {newest.machine.device}, torch {newest.machine.torch}"
        )
        calibration.save(folder / f"{calibration.name}.json")
        content["calibration"] = calibration.model_dump(mode="json")
        content["doubts"] = list(doubts(fit))
        add_predictions(cases, DATA_SHEET, gpu, default_constants())
        add_predictions(cases, FITTED, gpu, fit.constants)
    content["cases"] = [asdict(case) | {"name": case.name} for case in cases]
    result.write()


def main(arguments: list[str] | None = None) -> int:
    args = parser_of(__doc__).parse_args(arguments)
    prepare_environment(rehearse=args.rehearse)
    backend.require_core()
    plan, result = REHEARSAL if args.rehearse else CARD, Result(args)
    folder = args.json.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    cases: list[Case] = []
    with Tasks(threads=plan.threads, timeout=120) as tasks:
        for profiles, cases in measure(plan, tasks, result):
            keep(profiles, cases, result, folder)
    add_cases(cases, result)
    if "not_fitted" in result.content:
        result.add(f"No constants are fitted: {result.content['not_fitted']}")
    elif "calibration" in result.content:
        fit = result.content["calibration"]
        constants = {name: fit["constants"][name] for name in ("product_efficiency", "memory_efficiency")}
        result.add(
            f"Constants of {folder / fit['name']}.json, of {len(fit['entries'])} stages of which "
            f"{len(fit['unexplained'])} are unexplained, others off by {fit['mean_error']:.1%} in the mean: "
            + ", ".join(f"{name} {value:.3g}" for name, value in constants.items())
            + f", product_overhead {1e6 * fit['constants']['product_overhead']:.3g} us",
            **constants, product_overhead_seconds=fit["constants"]["product_overhead"],
        )  # fmt: skip
        for doubt in result.content["doubts"]:
            result.add(f"Of this fit: {doubt}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
