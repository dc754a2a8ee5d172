"""What is run, what is not run again, and what is read from a run's files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.commands.grid_search import trial_runs as module
from megatron.commands.grid_search.trial_results import ResultsFile, Status, TrialEntry
from megatron.commands.grid_search.trial_runs import METRICS, Runs, collect, iteration_seconds, measure
from megatron.planner import Configuration
from megatron.processes import End
from megatron.trainer.arguments import parse_args

ENTRIES = [
    TrialEntry(
        configuration=Configuration(pipeline=p, micro_batch_size=1, global_batch_size=8), predicted_seconds=1.0 * p
    )
    for p in (1, 2, 4)
]
MODEL = ("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32", "--lr", "1e-3")


def runs(tmp_path, **changes):
    return Runs(program="pretrain_gpt.py", argv=MODEL, output=tmp_path, iterations=5, warmup=2, **changes)


@pytest.fixture
def started(monkeypatch):
    """Names of the entries whose job was started. A job writes its metrics; one of two stages fails, one of four
    stages is killed together with the process that measures."""
    names = []

    def run_job(command, *, log, timeout, directory, folder, environment):
        names.append(log.parent.name)
        args = parse_args(command[command.index("pretrain_gpt.py") + 1 :])
        if args.pipeline_model_parallel_size == 2:
            log.write_text("pretrain_gpt.py: error: no such thing\n")
            return End(2, 1.0)
        with open(args.metrics_file, "w") as stream:
            for iteration in range(1, args.train_iters + 1):
                stream.write(json.dumps({"iteration": iteration, "iteration_time_ms": 1000.0 * iteration}) + "\n")
                if args.pipeline_model_parallel_size == 4 and len(names) < 4:
                    stream.flush()
                    raise KeyboardInterrupt
        log.write_text("")
        return End(0, 1.0)

    monkeypatch.setattr(module, "run_job", run_job)
    return names


def test_a_killed_measuring_goes_on_with_what_is_left(tmp_path, started):
    """What has a result, also a failure, is not run again; what was under way is, from its beginning."""
    with pytest.raises(KeyboardInterrupt):
        measure(runs(tmp_path), ENTRIES, ResultsFile(tmp_path / "results.jsonl"))
    results = ResultsFile(tmp_path / "results.jsonl")
    assert [each.status for each in results.of(ENTRIES)] == [Status.DONE, Status.ERROR]
    measure(runs(tmp_path), ENTRIES, results)
    first, second, third = (entry.name for entry in ENTRIES)
    assert started == [first, second, third, third]
    assert [each.status for each in results.of(ENTRIES)] == [Status.DONE, Status.ERROR, Status.DONE]
    measure(runs(tmp_path), ENTRIES, results)
    assert len(started) == 4
    measure(runs(tmp_path), ENTRIES, results, again=frozenset({Status.ERROR}))
    assert started[4:] == [second]


def test_seconds_are_the_median_without_the_warm_up(tmp_path, started):
    """Iterations of 1 to 5 s, of which 2 are warm-up."""
    result = runs(tmp_path).run(ENTRIES[0])
    assert (result.seconds, result.num_iterations, result.predicted_seconds) == (4.0, 3, 1.0)
    assert 3.0 <= result.low < 4.0 < result.high <= 5.0 and result.error == pytest.approx(-0.75)


def test_a_new_prediction_needs_no_new_run(tmp_path, started):
    """The results take over the prediction of the entries that they are asked for."""
    results = ResultsFile(tmp_path / "results.jsonl")
    measure(runs(tmp_path), ENTRIES[:1], results)
    later = [TrialEntry(configuration=ENTRIES[0].configuration, predicted_seconds=4.0)]
    measure(runs(tmp_path), later, results)
    assert len(started) == 1 and results.of(later)[0].error == 0.0


def test_too_few_iterations_are_no_result(tmp_path, monkeypatch):
    """A run that ends well but early, as on a signal, has not measured."""
    monkeypatch.setattr(module, "run_job", lambda command, **options: End(0, 1.0))
    result = runs(tmp_path).run(ENTRIES[0])
    assert result.status is Status.ERROR and "0 of 5 iterations" in result.sentence


def test_the_last_record_of_an_iteration_counts(tmp_path):
    """Evaluations and a torn last line are left out."""
    path = tmp_path / METRICS
    path.write_text(
        '{"iteration": 1, "iteration_time_ms": 1000}\n{"iteration": 2, "iteration_time_ms": 9000}\n'
        '{"iteration": 2, "validation_loss": 3.0}\n{"iteration": 2, "iteration_time_ms": 2000}\n{"iteration": 3, "it'
    )
    assert iteration_seconds(path) == [1.0, 2.0] and iteration_seconds(tmp_path / "none") == []


def test_scripts_for_a_cluster(tmp_path):
    """Nodes are full; the numbers come from the environment; results are taken once the script has run."""
    entry = TrialEntry(configuration=Configuration(tensor=8, pipeline=4, micro_batch_size=1, global_batch_size=8))
    script = runs(tmp_path).write_script(entry, 8)
    text = script.read_text()
    assert (
        '--nnodes "${NNODES:-4}"' in text
        and "--nproc-per-node 8" in text
        and "--pipeline-model-parallel-size 4" in text
    )
    assert script.stat().st_mode & 0o100
    results = ResultsFile(tmp_path / "results.jsonl")
    assert collect(runs(tmp_path), [entry], results) == [entry] and results.of([entry]) == []
    (script.parent / METRICS).write_text(
        "".join(json.dumps({"iteration": i, "iteration_time_ms": 500}) + "\n" for i in range(1, 6))
    )
    assert collect(runs(tmp_path), [entry], results) == [] and results.of([entry])[0].seconds == 0.5
    runs(tmp_path).write_script(entry, 8)
    other = replace(runs(tmp_path), argv=(*MODEL, "--bf16"))
    with pytest.raises(ValueError, match=r"run\.sh was written with other flags"):
        collect(other, [entry], results)
    with pytest.raises(ValueError, match="holds a run with other flags"):
        other.write_script(entry, 8)
    with pytest.raises(ValueError, match="do not fill nodes of 5"):
        runs(tmp_path).write_script(entry, 5)


@pytest.mark.parametrize("warmup", [5, -1])
def test_a_warm_up_leaves_something_to_measure(tmp_path, warmup):
    """All iterations, or fewer than none, are refused."""
    with pytest.raises(ValueError, match=f"5 iterations {warmup} are warm-up"):
        Runs(program="pretrain_gpt.py", argv=(), output=tmp_path, iterations=5, warmup=warmup)


def test_a_script_starts_the_run_again(tmp_path, started):
    """With the same environment, and metrics of its own."""
    lines = Path(runs(tmp_path, threads=3).run(ENTRIES[0]).directory, "run.sh").read_text().splitlines()
    assert "export OMP_NUM_THREADS=3 CUDA_DEVICE_MAX_CONNECTIONS=32" in lines
    assert f"rm -f {tmp_path / ENTRIES[0].name / METRICS}" in lines


def test_results_of_other_settings_are_refused(tmp_path, started):
    """What was measured of another model, or for another time, stands for no run now; other entries do not matter."""
    results = ResultsFile(tmp_path / "results.jsonl")
    measure(runs(tmp_path), ENTRIES[:2], results)
    results.refuse_others(ENTRIES, runs(tmp_path, timeout=5.0).settings)
    other = replace(runs(tmp_path), argv=(*MODEL[:3], "128", *MODEL[4:], "--bf16"), warmup=1).settings
    with pytest.raises(
        ValueError, match=f"{ENTRIES[1].name} with --hidden-size 64 and not 128, --warmup 2 and not 1, no --bf16; give"
    ):
        results.refuse_others(ENTRIES[1:], other)
    results.refuse_others(ENTRIES[2:], other)


def test_an_optimized_mapping_needs_the_nodes(tmp_path):
    """Their file is handed on; without one the configuration is refused by name."""
    entry = TrialEntry(configuration=replace(ENTRIES[1].configuration, rank_mapping="optimized"))
    argv = runs(tmp_path, topology=Path("topology.yaml")).training_argv(entry)
    assert argv[-2:] == ["--rank-topology", str(Path("topology.yaml").absolute())]
    with pytest.raises(ValueError, match="optimized needs the cluster's nodes; give --rank-topology"):
        runs(tmp_path).training_argv(entry)
