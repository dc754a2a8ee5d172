"""Training of a small `megatron.training` of our own, under its own 1F1B and under our schedules: what its log says."""

import functools
import json
import re

import pytest

from megatron.pipeline.schedules import Schedule
from tests.pipeline.dropin import fake_training
from tests.pipeline.dropin.fake_training import fork, losses

FULL = pytest.mark.full
P = "--pipeline-model-parallel-size"
VALIDATION = re.compile(r"validation loss at iteration (\d+) \| lm loss value: (\S+)")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return fake_training.write(tmp_path_factory.mktemp("megatron") / "checkout")


@pytest.fixture(scope="module")
def run(checkout):
    """The output of a run with these flags; each runs once."""

    @functools.cache
    def train(flags: str, *, ranks: int = 2) -> str:
        done = fork("pretrain_small.py", *flags.split(), num_ranks=ranks, cwd=checkout, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    return train


@pytest.mark.parametrize(
    ("flags", "ranks", "schedule"),
    [
        (f"{P} 2 --eval-interval 2", 2, "flush"),
        pytest.param(f"{P} 2 --eval-interval 2", 2, "gpipe", marks=FULL),
        pytest.param(f"{P} 2", 2, "zb-h1", marks=FULL),
        pytest.param(f"{P} 2", 2, "zb-h2", marks=FULL),
        pytest.param(f"{P} 1", 1, "flush", marks=FULL),
        pytest.param(f"{P} 4", 4, "bpipe", marks=FULL),
        pytest.param(f"{P} 2", 4, "flush", marks=FULL),
        pytest.param(f"{P} 2 --overlap-grad-reduce", 4, "flush", marks=FULL),
        pytest.param(f"{P} 2 --overlap-grad-reduce", 4, "zb-h1", marks=FULL),
    ],
)
def test_schedules_that_drain_train_as_theirs(flags, ranks, schedule, run):
    """Losses, norms and evaluations, to the last digit of FP32."""
    ours, theirs = run(f"{flags} --pipeline-schedule {schedule}", ranks=ranks), run(flags, ranks=ranks)
    assert losses(ours) == losses(theirs) and len(losses(ours)) == 4
    assert VALIDATION.findall(ours) == VALIDATION.findall(theirs)
    assert f"--pipeline-schedule {schedule}: " in ours and "pipeline-schedule" not in theirs


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["interleaved", "interleaved-zb"])
def test_interleaved_trains_as_flush_from_one_checkpoint(schedule, run, tmp_path):
    """Each rank has two chunks, and each of them data of its own."""
    run(f"{P} 2 --train-iters 1 --clip-grad 0 --save {tmp_path}/save --save-interval 1")
    shared = f"{P} 2 --load {tmp_path}/save --clip-grad 0"
    flush = run(f"{shared} --pipeline-schedule flush")
    ours = run(f"{shared} --virtual-pipeline-model-parallel-size 2 --pipeline-schedule {schedule}")
    assert [each[:2] for each in losses(ours)] == [each[:2] for each in losses(flush)]


def test_2bw_is_late_by_one_version_and_drains_where_it_must(run, tmp_path):
    """The first loss is flush's, as the weights are; the gradient's norm comes with the next iteration's line, and the
    last at the end. With evaluations and saves in between nothing else changes, and a resumed run goes on exactly.
    """
    plain = run(f"{P} 2 --train-iters 6 --pipeline-schedule 2bw")
    disturbed = run(
        f"{P} 2 --train-iters 6 --pipeline-schedule 2bw --eval-interval 2 --save {tmp_path}/save --save-interval 3"
    )
    flush = run(f"{P} 2 --eval-interval 2")
    assert losses(plain) == losses(disturbed)
    assert losses(plain)[0] == (1, losses(flush)[0][1], "None")
    assert float(losses(plain)[1][2]) == pytest.approx(float(losses(flush)[0][2]), rel=1e-6)
    assert losses(plain)[3][1] != losses(flush)[3][1]
    assert "the last iteration: gradient norm" in plain
    assert "2bw computes each batch at the weights of one update before" in plain
    assert all(remedy in plain for remedy in ("--2bw-provisional stage", "a smaller --lr"))
    assert len(VALIDATION.findall(disturbed)) >= 3

    (tmp_path / "save" / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = run(f"{P} 2 --train-iters 6 --pipeline-schedule 2bw --load {tmp_path}/save")
    assert [each[:2] for each in losses(resumed)] == [each[:2] for each in losses(plain)][3:]
    assert "warning" not in resumed


@pytest.mark.full
def test_predicted_weights_go_on_exactly_by_the_rows_of_a_file(run, tmp_path):
    """From a checkpoint, which has the prediction, too, under a program with the rows that the flags mean; evaluations
    and saves have changed nothing.
    """
    flags = f"{P} 2 --train-iters 4 --pipeline-schedule 2bw --2bw-provisional stage"
    whole = run(f"{flags} --eval-interval 2 --save {tmp_path}/save --save-interval 2")
    schedule = Schedule.preset("2bw", num_stages=2, predict=True, tied_embeddings=True)
    (tmp_path / "rows.csv").write_text(schedule.build((4,) * 5).to_csv())
    (tmp_path / "save" / "latest_checkpointed_iteration.txt").write_text("2")
    rest = run(f"{P} 2 --train-iters 4 --pipeline-program {tmp_path}/rows.csv --load {tmp_path}/save")
    assert [each[:2] for each in losses(rest)] == [each[:2] for each in losses(whole)][2:]
    assert len(losses(whole)) == 4 and "warning" not in rest
    assert "2bw with provisional weights: stages read 3, 4 of 4 microbatches" in whole


def test_an_exit_drains(run, tmp_path):
    """SystemExit leaves the loop with nothing in flight; without a save, too. The timeline is written behind it."""
    flags = f"{P} 2 --train-iters 6 --pipeline-schedule 2bw --exit-interval 3 --pipeline-timeline {tmp_path}/picture"
    assert len(losses(run(flags))) == 3
    trace = json.loads((tmp_path / "picture" / "trace.json").read_text())
    assert len(trace["traceEvents"]) > 10 and (tmp_path / "picture" / "timeline.png").is_file()


@pytest.mark.full
def test_one_version_in_a_checkpoint_is_said(run, tmp_path):
    """2bw goes on from theirs with a warning, and theirs from 2bw's without."""
    run(f"{P} 2 --train-iters 1 --save {tmp_path}/theirs --save-interval 1")
    warned = run(f"{P} 2 --load {tmp_path}/theirs --pipeline-schedule 2bw --save {tmp_path}/ours --save-interval 4")
    assert "iteration 1 was saved under a schedule of Megatron-LM and has one weight version" in warned
    native = run(f"{P} 2 --train-iters 6 --load {tmp_path}/ours")
    assert losses(native) == losses(run(f"{P} 2 --train-iters 6 --load {tmp_path}/ours --pipeline-schedule flush"))


@pytest.mark.full
def test_a_tuple_of_seven(tmp_path):
    """As in older versions: nothing of ours looks at what train_step returns."""
    older = fake_training.write(tmp_path / "older", num_values=7)
    found = [
        fork("pretrain_small.py", P, 2, "--pipeline-schedule", name, num_ranks=2, cwd=older, CUDA_VISIBLE_DEVICES="")
        for name in ("flush", "2bw")
    ]
    assert [done.returncode for done in found] == [0, 0]
    assert losses(found[0].stdout)[0][1] == losses(found[1].stdout)[0][1]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--pipeline-schedule zbv", "--pipeline-schedule zbv places two stages on each rank"),
        pytest.param(
            "--pipeline-schedule 2bw --save somewhere --ckpt-format torch",
            "--ckpt-format torch has no place for the two weight versions",
            marks=FULL,
        ),
        pytest.param(
            "--pipeline-log-saved-activations",
            "--pipeline-log-saved-activations is for a pipeline schedule",
            marks=FULL,
        ),
    ],
)
def test_refused_before_any_process_group(flags, sentence, checkout):
    """Status 2 and one sentence."""
    done = fork("pretrain_small.py", *flags.split(), num_ranks=1, cwd=checkout, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and done.stderr.count(f"error: {sentence}") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_ranks_are_mapped_before_the_process_group(run):
    """pair-adjacent on one node: stages 0 and 3 lie side by side, and training is what it was."""
    shared = f"{P} 4 --pipeline-schedule bpipe"
    mapped = run(f"{shared} --pipeline-rank-mapping pair-adjacent", ranks=4)
    assert "--pipeline-rank-mapping pair-adjacent on 1 node" in mapped
    assert losses(mapped) == losses(run(shared, ranks=4))
