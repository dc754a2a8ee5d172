"""The part `calibration` of the hour: errors from planted times, and files that the planner takes."""

import json
from dataclasses import replace
from datetime import datetime, timezone
from types import SimpleNamespace

import pytest

from benchmarks.gpu_hour import calibration
from benchmarks.gpu_hour.calibration import CARD, DATA_SHEET, FITTED, PROFILE, Case
from benchmarks.gpu_hour.trained import Size
from megatron.commands.grid_search.trial_results import predicted_seconds
from megatron.planner import Cluster, Configuration
from megatron.planner.published.entries import Entry, load_entries
from megatron.planner.time.calibration import START, load_calibration
from megatron.planner.time.first_principles import FirstPrinciples
from megatron.planner.time.profile import Machine, Profile, Spread, StagePosition, StageTime, UpdateTime, load_profile
from tests.benchmarks.gpu_hour.fake_hour import Said

TRUE = replace(START, product_efficiency=0.6, product_overhead=20e-6, memory_efficiency=0.7, launch=30e-6)
SHAPE = CARD.shapes[0]


def spread(seconds: float) -> Spread:
    return Spread(median=seconds, low=seconds, high=seconds, count=1)


def planted(shape: Size = SHAPE, device: str = "NVIDIA H200") -> Profile:
    """A profile with the times that `TRUE` gives on H200."""
    job = calibration.job_of(shape)
    stages, updates = [], []
    for place, index, pipeline in (("only", 0, 1), ("first", 0, 3), ("middle", 1, 3), ("last", 2, 3)):
        for count in (1, 3) if place == "middle" else (1,):
            for size in (1, 4):
                layers = (count,) * pipeline
                asked = Configuration(pipeline=pipeline, micro_batch_size=size, global_batch_size=size)
                cluster = Cluster(gpu="H200", nodes=1, gpus_per_node=pipeline)
                shape_of = replace(job.shape(1), num_layers=sum(layers))
                costs = FirstPrinciples(shape_of, cluster, job.software, TRUE).costs(asked, layers)
                stages.append(StageTime(
                    place=StagePosition(place), num_layers=count, tensor=1, micro_batch_size=size, recompute="none",
                    working=1, forward=spread(costs.forward[index]), backward=spread(costs.backward[index]),
                ))  # fmt: skip
            updates.append(UpdateTime(
                place=StagePosition(place), num_layers=count, num_parameters=1000 * count, tensor=1, weights="flush",
                working=1, zero=spread(0.0), norm=spread(0.0), step=spread(1e-6),
            ))  # fmt: skip
    return Profile(
        created=datetime.now(timezone.utc), architecture="gpt", flags=tuple(shape.model_argv()), model=job.shape(1),
        dtype="bfloat16", transformer_impl="local", sequence_parallel=False, processes=1, shares_processor=False,
        machine=Machine(
            device=device, num_devices=1, threads=1, system="Linux", torch="2.11", megatron_core="0.18"
        ),
        stages=tuple(stages), updates=tuple(updates), transfers=(), all_reduces=(),
    )  # fmt: skip


def cases(*seconds: list[float]) -> list[Case]:
    """Cases of growing depth with these measured seconds in each round."""
    return [Case(replace(SHAPE, layers=4 * number), measured=each) for number, each in enumerate(seconds, 1)]


def test_errors_are_of_the_rounds():
    """Predicted over measured, less 1: the median over the rounds of a case, mean and worst over the cases."""
    first, second, not_run = cases([2.0, 4.0, 5.0], [1.0], [])
    first.predicted = {PROFILE: [1.0, 5.0, 5.0]}
    second.predicted = {PROFILE: [0.9], DATA_SHEET: [1.3]}
    assert first.errors(PROFILE) == [-0.5, 0.25, 0.0]
    said = Said()
    calibration.add_cases([first, second, not_run], said)
    assert said.figures["profile_errors_ratio"] == pytest.approx([0.0, -0.1])
    assert said.figures["data_sheet_errors_ratio"] == pytest.approx([0.3])
    assert "off by 5.0% in the mean of 2 runs, -10.0% at most" in said.lines[2]
    assert len(said.lines) == 4 and "h4096 s2048, 4 layers" in said.lines[0] and "(+0.0%)" in said.lines[0]


def test_files_are_those_that_the_planner_takes(tmp_path):
    """A profile of planted times, on a card that the planner knows: its constants are found again, with which it
    predicts what was measured; profile, calibration and entries can be read by the planner's own readers.
    """
    profile, said = planted(), Said()
    measured = [calibration.from_data_sheet(case, "H200", TRUE) for case in cases([], [])]
    found = cases(*([each] * 2 for each in measured))
    for case in found:
        seconds = predicted_seconds(profile, case.configuration, num_layers=case.size.layers)
        case.predicted[PROFILE] = [seconds] * 2
    calibration.keep({"h4096 s2048": profile}, found, said, tmp_path)
    assert load_profile(tmp_path / "profile_h4096_s2048.json") == profile
    constants = load_calibration(str(tmp_path / "h200.json")).fitted
    for name in ("product_efficiency", "product_overhead", "memory_efficiency"):
        assert getattr(constants, name) == pytest.approx(getattr(TRUE, name), rel=0.03)
    for case in found:
        assert case.predicted[FITTED] == pytest.approx(case.measured, rel=0.01)
        assert all(each > 0 for by in (PROFILE, DATA_SHEET) for each in case.predicted[by])
        assert abs(case.errors(DATA_SHEET)[0]) > 0.05  # the package's constants are others
    entries = load_entries(tmp_path / "entries.json")
    assert [type(each) for each in entries] == [Entry] * 2 and [each.seconds for each in entries] == measured
    assert [each.model.num_layers for each in entries] == [4, 8] and entries[0].cluster.gpu == "H200"
    assert set(said.content) >= {"card", "torch", "profiles", "entries", "calibration", "cases"}
    json.dumps(said.content)


def test_an_unknown_card_is_not_fitted(tmp_path):
    """Its profile and its runs are kept, for a later fit."""
    said = Said()
    calibration.keep({"h4096 s2048": planted(device="NVIDIA X1")}, cases([1.0]), said, tmp_path)
    assert said.content["not_fitted"] == "the planner has no data sheet of NVIDIA X1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["entries.json", "profile_h4096_s2048.json"]


def test_a_run_that_fails_is_left_out(monkeypatch):
    """Out of memory in one run: it is said once, the others have a time for each round, and a shape whose blocks cannot
    be profiled ends only its own rounds.
    """
    plan = replace(CARD, depths=(4,), micro_batches=(1, 4), rounds=2)

    def profile(shape: Size, plan: object, tasks: object) -> Profile:
        if shape == plan.shapes[1]:
            raise ValueError("process 0: out of memory\ntrace")
        return planted(shape)

    def do(run, argv, **options) -> dict:
        if argv[argv.index("--micro-batch-size") + 1] == "4":
            return {"failed": "CUDA out of memory.", "out_of_memory": True}
        return {"seconds": [3.0, 1.0, 2.0], "losses": []}

    monkeypatch.setattr(calibration, "profiled", profile)
    said = Said()
    rounds = [list(found) for _, found in calibration.measure(plan, SimpleNamespace(do=do), said)]
    assert len(rounds) == 2
    ran, failed, *others = rounds[-1]
    assert ran.measured == [2.0, 2.0] and len(ran.predicted[PROFILE]) == 2 and min(ran.predicted[PROFILE]) > 0
    assert failed.measured == [] and failed.failed == "CUDA out of memory." and others == []
    assert said.lines == [
        "h4096 s2048, 4 layers, microbatches of 4: out of memory: CUDA out of memory.",
        "h2048 s1024 cannot be profiled: process 0: out of memory",
    ]


def test_a_round_without_a_prediction_is_left_out(monkeypatch):
    """A profile whose difference is below zero predicts nothing; the round behind it counts."""
    plan = replace(CARD, shapes=(SHAPE,), depths=(4,), micro_batches=(1,), rounds=2)
    answers = iter([ValueError("step is [-0.1]; give seconds\ntrace"), 3.0])

    def predict(*_, **__) -> float:
        if isinstance(answer := next(answers), ValueError):
            raise answer
        return answer

    monkeypatch.setattr(calibration, "profiled", lambda *_: planted())
    monkeypatch.setattr(calibration, "predicted_seconds", predict)
    said = Said()
    do = SimpleNamespace(do=lambda *_, **__: {"seconds": [2.0], "losses": []})
    [case] = [list(found) for _, found in calibration.measure(plan, do, said)][-1]
    assert (case.measured, case.predicted, case.failed) == ([2.0], {PROFILE: [3.0]}, None)
    assert said.lines == [f"{case.name} is not predicted from this profile: step is [-0.1]; give seconds"]
