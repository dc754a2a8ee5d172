"""The schedule that arguments name, and the batches of a run."""

import pytest

from megatron.pipeline.dropin.flags import batches_of, prove, runnable, schedule_of, weights_of
from megatron.pipeline.dropin.refusals import require_supported
from megatron.pipeline.schedules import Schedule
from tests.pipeline.dropin.arguments import arguments


def test_where_megatron_reduces_the_program_does_not():
    """Flush has no reductions of its own, with replicas and a tied embedding; 2bw has both."""
    words = {}
    for name in ("flush", "2bw"):
        args = arguments(f"--pipeline-schedule {name}", data_parallel_size=2)
        program = schedule_of(args, tied_embeddings=True).build((4, 4))
        words[name] = {instruction.kind.name for row in program.rows for instruction in row}
    assert not words["flush"] & {"REDUCE_GRAD", "REDUCE_EMBED"} and words["2bw"] >= {"REDUCE_GRAD", "REDUCE_EMBED"}


def test_interleaved_takes_their_group_of_microbatches():
    """Stages are dealt out in turn, as Megatron-LM's providers do."""
    args = arguments(
        "--pipeline-schedule interleaved", virtual_pipeline_model_parallel_size=2, microbatch_group_size_per_vp_stage=4
    )
    schedule = schedule_of(args, tied_embeddings=False)
    assert schedule.rank_of_stage == (0, 1, 0, 1) and schedule.microbatch_group_size == 4


def test_batches_that_grow():
    """Each size once, in order, as microbatches of a pipeline."""
    assert batches_of(arguments("", global_batch_size=8)) == [4]
    grows = arguments("", rampup_batch_size=["8", "4", "100"], global_batch_size=16, data_parallel_size=2)
    assert batches_of(grows) == [2, 3, 4]
    prove(schedule_of(arguments("--pipeline-schedule 2bw"), tied_embeddings=False), batches_of(grows))


@pytest.fixture
def rows(tmp_path):
    """A preset's program of four batches as a file; returns the flag that names it."""

    def write(name, **choices):
        choices = {"num_stages": 2, **choices}
        file = tmp_path / f"{name}.csv"
        file.write_text(Schedule.preset(name, **choices).build((4, 4, 4, 4)).to_csv())
        return f"--pipeline-program {file}"

    return write


@pytest.mark.parametrize(("name", "reduces"), [("flush", False), ("flush", True), ("2bw", True)])
def test_a_program_of_a_file(name, reduces, rows):
    """It is proved, runs for any number of batches, and has what the preset has. Under flush Megatron-LM reduces, so
    the file may leave reductions out, or not.
    """
    facts = {"tied_embeddings": reduces, "data_parallel": reduces}
    args = arguments(rows(name, **facts), data_parallel_size=2, global_batch_size=16)
    schedule = schedule_of(args, tied_embeddings=True)
    prove(schedule, batches_of(args))
    assert weights_of(args).name == name and schedule.num_stages == 2
    preset = Schedule.preset(name, num_stages=2, **facts)
    assert schedule.build((4, 4, 4)).rows == preset.build((4, 4, 4)).rows


@pytest.mark.parametrize(
    ("name", "choices", "values", "sentence"),
    [
        ("2bw", {}, {"data_parallel_size": 2}, "does not reduce"),
        ("flush", {"recompute": True}, {}, "recomputes activations before its backwards, and the run does not"),
        ("flush", {"num_stages": 4}, {}, "has 4 stages on the ranks 0, 1, 2, 3, and .* a chain of 2, .*; write|write"),
        ("zbv", {"num_stages": 4}, {"virtual_pipeline_model_parallel_size": 2}, "has 4 stages on the ranks 0, 1, 1, 0"),
        ("pipedream", {}, {}, "has each stage step by itself"),
        ("flush", {}, {"global_batch_size": 12}, "6"),
    ],
)
def test_a_program_that_is_for_another_run(name, choices, values, sentence, tmp_path):
    """Each named with its file."""
    choices = {"num_stages": 2, "tied_embeddings": name == "2bw", **choices}
    batches = (1, 1, 1, 1) if name == "pipedream" else (4, 4)
    file = tmp_path / "rows.csv"
    file.write_text(Schedule.preset(name, **choices).build(batches).to_csv())
    args = arguments(f"--pipeline-program {file}", **values)
    with pytest.raises(ValueError, match=rf"{file}.*({sentence})"):
        prove(schedule_of(args, tied_embeddings=name == "2bw"), batches_of(args))


def test_predicted_weights():
    """What the flags say is what the schedule has."""
    flags = (
        "--pipeline-schedule 2bw --2bw-provisional uniform --2bw-provisional-microbatches 2 --2bw-provisional-reduce"
    )
    schedule = schedule_of(arguments(flags, data_parallel_size=2), tied_embeddings=False)
    assert schedule.weights.predicts and schedule.provisional_microbatches == 2 and schedule.reduce_partial
    args = arguments(flags.replace(" 2 ", " 4 "))
    with pytest.raises(ValueError, match=r"--2bw-provisional-microbatches 4: with batches of 4 .* give 0 to 3"):
        prove(schedule_of(args, tied_embeddings=False), batches_of(args))


def test_error_feedback():
    """The flag of this project's own programs: a prediction that reads nothing."""
    args = arguments("--pipeline-schedule 2bw --2bw-error-feedback")
    require_supported(args)
    schedule = schedule_of(args, tied_embeddings=False)
    assert schedule.weights.predicts and schedule.provisional_microbatches == 0


def test_what_can_run_is_what_help_lists(capsys):
    """And nothing else."""
    assert runnable() == ("gpipe", "flush", "2bw", "interleaved", "bpipe", "zb-h1", "zb-h2", "interleaved-zb")
    with pytest.raises(SystemExit):
        arguments("--help")
    assert "{gpipe,flush,2bw,interleaved,bpipe,zb-h1,zb-h2,interleaved-zb}" in "".join(capsys.readouterr().out.split())
