"""tools/profile_model.py from its flags to a profile that predicts."""

from dataclasses import replace

import pytest

from megatron.commands import profile_model as tool
from megatron.commands.grid_search import measure
from megatron.commands.grid_search.trial_results import predicted_seconds
from megatron.documents import command_line
from megatron.planner import Configuration
from megatron.planner.time.profile import load_profile
from tests.trainer.run.run_case import BASE, data_flags


def flags(extra: str = "") -> list[str]:
    return f"{BASE} --global-batch-size 8 {data_flags()} {extra}".split()


@pytest.mark.full
@pytest.mark.alone  # it takes seconds from seconds: beside another test, less than 0 may remain
def test_one_process_profiles_what_one_rank_needs(run, tmp_path):
    """Every place, both lengths of the middle; the profile predicts p = 1 and says what p = 2 lacks."""
    output = tmp_path / "profile.json"
    status, out, err = run(
        "--output", output, "--processes", 1, "--iterations", 4, "--rounds", 1, "--weights", "flush", *flags()
    )
    assert status == 0, err
    profile = load_profile(output)
    assert {(each.place.value, each.num_layers) for each in profile.stages} == {
        ("middle", 1), ("middle", 3), ("only", 1), ("first", 1), ("last", 1),
    }  # fmt: skip
    assert all((each.working, each.forward.count) == (1, 1) for each in profile.stages)
    assert (profile.dtype, profile.model.hidden_size, profile.shares_processor) == ("float32", 32, True)
    assert "--micro-batch-size" not in profile.flags and "--data-path" in profile.flags
    assert "middle" in out and str(output) in out and "5/5" in err
    assert {(each.direction, each.working) for each in profile.copies} == {("to device", 1), ("from device", 1)}
    assert {each.kernel for each in profile.host_updates} == {"loop", "fused"}
    assert "GB/s of one process" in out and "host's AdamW, fused, 1 at work" in out
    one, two = (Configuration(pipeline=p, micro_batch_size=1, global_batch_size=4) for p in (1, 2))
    assert predicted_seconds(profile, one, num_layers=4) > 0
    relayed = replace(one, schedule="l2l", virtual=4)
    assert predicted_seconds(profile, relayed, num_layers=4) > predicted_seconds(profile, one, num_layers=4)
    with pytest.raises(ValueError, match="--processes 2"):
        predicted_seconds(profile, two, num_layers=4)


@pytest.mark.full
def test_two_processes_profile_what_a_pipeline_and_tensor_ranks_need(run, tmp_path):
    """Both policies, two scopes and sizes, one and two at work, transfers and all-reduces: p = 2 and t = 2 are
    predicted, for a microbatch size between, too."""
    output = tmp_path / "profile.json"
    status, _, err = run(
        "--output", output, "--processes", 2, "--iterations", 8, "--tensor-sizes", "1,2", "--micro-batch-sizes", "1,4",
        "--recompute", "none,layer", *flags(),
    )  # fmt: skip
    assert status == 0, err
    profile = load_profile(output)
    assert {(each.tensor, each.working) for each in profile.stages} == {(1, 1), (1, 2), (2, 2)}
    assert {each.weights for each in profile.updates} == {"flush", "2bw"}
    assert all(each.forward.count == 2 * each.working for each in profile.stages)  # a batch a round of each
    for changes in (
        {"pipeline": 2, "schedule": "2bw"},
        {"pipeline": 2, "recompute": "layer"},
        {"tensor": 2},
        {"data": 2},
        {"pipeline": 2, "virtual": 2, "schedule": "l2l", "stash": "host"},
    ):
        configuration = Configuration(micro_batch_size=2, global_batch_size=16, **changes)
        assert predicted_seconds(profile, configuration, num_layers=4) > 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--tensor-sizes", "4", "--processes", "2"], 1, "tensor degree 4 needs as many processes, and there are 2"),
        (["--layers", "3", "3", "--processes", "2"], 1, "--layers 3 3"),
        (["--processes", "2", "--output", "."], 1, "--output . cannot be written"),
        (["--recompute", "some"], 2, "'some' is none of none, attention, layer"),
        (["--weights", "stash"], 2, "'stash' is none of flush, 2bw"),
        (["--micro-batch-sizes", "0"], 2, "no positive whole number"),
    ],
)
def test_what_cannot_be_profiled_is_refused(run, tmp_path, arguments, status, message):
    found, _, err = run("--output", tmp_path / "profile.json", *arguments, *flags())
    assert found == status and message in err and not list(tmp_path.iterdir())


def test_missing_flags_are_told_before_a_process_starts(run, tmp_path):
    """All of them at once."""
    found, _, err = run("--output", tmp_path / "profile.json", "--processes", 1, "--num-layers", 4, "--seq-length", 8)
    assert found == 1 and err.startswith("error: nothing can be measured: ") and "process" not in err
    assert all(flag in err for flag in ("--hidden-size, --num-attention-heads", "--lr is", "--tokenizer-type is"))


@pytest.mark.parametrize(("value", "threads"), [("", 1), ("4,2", 4), ("3", 3), ("many", None)])
@pytest.mark.parametrize("command", [tool, measure])
def test_threads_are_those_of_the_environment(monkeypatch, capsys, command, value, threads):
    """OMP_NUM_THREADS may be empty, or have numbers for nested regions; what is no number is refused."""
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    parser = command_line.parser_of("A command.")
    if command is measure:
        measure.add_arguments(parser)
    parse = tool._parse if command is tool else lambda argv: parser.parse_known_args(argv)[0]
    if threads is not None:
        assert parse(["--output", "a"]).threads == threads
        return
    with pytest.raises(SystemExit):
        parse(["--output", "a"])
    assert "argument --threads: 'many' is no positive whole number" in capsys.readouterr().err


@pytest.mark.full
def test_what_a_run_would_refuse_is_refused(run, tmp_path):
    """The refusal of the training program, in one line; no profile is written."""
    found, _, err = run("--output", tmp_path / "profile.json", "--processes", 1, *flags("--num-attention-heads 3"))
    assert found == 1 and "error: process 0: " in err and "--num-attention-heads" in err
    assert not list(tmp_path.iterdir())
