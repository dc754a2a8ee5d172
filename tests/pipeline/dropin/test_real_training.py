"""A real checkout's `pretrain_gpt.py` under its own schedule and under ours: losses, norms and all that is saved.

Opt-in: MEGATRON_LM=/path/to/checkout. It takes some 20 minutes on two cores.
"""

import functools
import math
import os
import signal
import subprocess
import time

import pytest

from megatron.pipeline.schedules import Schedule
from tests.pipeline.dropin.fake_training import environment
from tests.pipeline.dropin.real_training import (
    CHECKOUT,
    beside_own_program,
    checkpoint_tensors,
    command_of,
    different,
    needs_checkout,
    read_scalars,
    train,
)

pytestmark = [needs_checkout, pytest.mark.timeout(1200)]

STAGES = "--pipeline-model-parallel-size"
DRAINING = ("flush", "gpipe", "bpipe", "zb-h1")
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall "
    "--disable-bias-linear --no-bias-gelu-fusion"
)
CASES = {
    "p=1": (1, f"{STAGES} 1", DRAINING),
    "p=2": (2, f"{STAGES} 2", DRAINING),
    "p=4": (4, f"{STAGES} 4", DRAINING),
    "p=2 t=2": (4, f"{STAGES} 2 --tensor-model-parallel-size 2", DRAINING),
    "sequence parallel": (4, f"{STAGES} 2 --tensor-model-parallel-size 2 --sequence-parallel", ("flush", "zb-h1")),
    "p=2 d=2": (4, f"{STAGES} 2", DRAINING),
    "distributed optimizer": (4, f"{STAGES} 2 --use-distributed-optimizer", ("flush", "zb-h1")),
    "bf16": (4, f"{STAGES} 4 --bf16", DRAINING),
    "fp16 with overflows": (
        4, f"{STAGES} 4 --fp16 --initial-loss-scale 1048576 --loss-scale-window 2 --hysteresis 1", DRAINING,
    ),
    "untied": (2, f"{STAGES} 2 --untie-embeddings-and-output-weights", ("flush", "zb-h1")),
    "dropout": (4, f"{STAGES} 4 --hidden-dropout 0.1 --attention-dropout 0.1", ("flush", "bpipe", "zb-h1")),
    "recompute": (
        2, f"{STAGES} 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        ("flush", "zb-h1"),
    ),
    "overlapped": (
        4, f"{STAGES} 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--ddp-bucket-size 20000", DRAINING,
    ),
    "experts": (2, f"{STAGES} 2 {EXPERTS}", ("flush", "zb-h1")),
    "experts over two ranks": (4, f"{STAGES} 2 {EXPERTS} --expert-model-parallel-size 2", ("flush",)),
    "loss per token": (2, f"{STAGES} 2 --calculate-per-token-loss", ("flush",)),
    "batches that grow": (2, f"{STAGES} 2 --rampup-batch-size 4 4 60", ("flush",)),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="module")
def native(folder):
    """case -> its run under Megatron-LM's own 1F1B."""

    @functools.cache
    def run(case):
        ranks, flags, _ = CASES[case]
        return train(folder / case.replace(" ", "-"), flags, ranks=ranks)

    return run


@pytest.fixture(scope="module")
def start(native):
    """The flags that begin from the weights of one checkpoint of theirs."""
    return f"{STAGES} 2 --load {native('p=2').save} --finetune"


@pytest.fixture(scope="module")
def twobw(folder, start):
    """Ten iterations of 2bw, with nothing in between."""
    return train(folder / "2bw", start, ranks=2, schedule="2bw")


@pytest.mark.parametrize(
    ("case", "schedule"), [(case, name) for case, (_, _, names) in CASES.items() for name in names]
)
def test_bit_equal_to_their_own_schedule(case, schedule, native, tmp_path):
    """Losses, norms and loss scales of ten iterations, and every tensor of the checkpoint."""
    ranks, flags, _ = CASES[case]
    ours = train(tmp_path, flags, ranks=ranks, schedule=schedule)
    assert ours.scalars == native(case).scalars and len(ours.scalars.losses) >= 5
    assert not different(ours.tensors(), native(case).tensors())
    if "overflows" in case:  # some batches are skipped, and some are stepped
        assert 0 < len(ours.scalars.norms) < len(ours.scalars.losses)


def test_interleaved_is_flush_from_one_checkpoint(start, tmp_path):
    """Their own is wrong on gloo. Without clipping: the norm of two chunks is summed in another order."""
    flush = train(tmp_path / "flush", f"{start} --clip-grad 0", ranks=2, schedule="flush")
    ours = train(
        tmp_path / "interleaved", f"{start} --clip-grad 0 --num-virtual-stages-per-pipeline-rank 2", ranks=2,
        schedule="interleaved",
    )  # fmt: skip
    assert ours.scalars.losses == flush.scalars.losses
    assert not different(ours.tensors(), flush.tensors())


TWO_BW = {
    "": 2,
    "--rampup-batch-size 4 4 60": 2,
    "--use-distributed-optimizer --bf16": 4,
    "--tensor-model-parallel-size 2": 4,
    "--2bw-provisional stage": 2,
    "--2bw-provisional uniform --2bw-provisional-microbatches 3 --2bw-provisional-reduce --use-distributed-optimizer "
    "--bf16": 4,
    "--fp16 --initial-loss-scale 1048576 --loss-scale-window 2 --hysteresis 1": 2,
}


def weights_of(tensors):
    """Without what the optimizer keeps."""
    return {key: tensor for key, tensor in tensors.items() if not key.startswith("optimizer.")}


def test_2bw_begins_as_flush(start, twobw, tmp_path):
    """Whichever megatron.core it is: the first batch's loss, and its gradient's norm an iteration later."""
    flush = train(tmp_path, start, ranks=2, schedule="flush")
    assert twobw.scalars.losses[1] == flush.scalars.losses[1]
    assert twobw.scalars.norms[2] == pytest.approx(flush.scalars.norms[1], rel=2e-7)


@beside_own_program
@pytest.mark.parametrize("further", TWO_BW)
def test_2bw_is_this_projects_own(further, start, twobw, tmp_path):
    """From one checkpoint: every tensor of what is saved, both weight versions among them; norms one iteration late.
    Losses are averaged over microbatches in FP32 there and in float64 here, so they are equal but for the last bit.
    """
    ranks = TWO_BW[further]
    own = train(tmp_path / "own", f"{start} {further}", ranks=ranks, schedule="2bw", own=True)
    theirs = train(tmp_path / "theirs", f"{start} {further}", ranks=ranks, schedule="2bw") if further else twobw
    saved = theirs.tensors()
    found = own.tensors()
    kept = "provisional_version." if "provisional" in further else "previous_version."
    assert any(key.startswith(kept) for key in saved)
    if "distributed" in further:  # their optimizer's state is saved in parts, by ranks
        saved, found = (weights_of(each) for each in (saved, found))
    assert len(saved) > 20 and not different(saved, found)
    assert theirs.scalars.losses == pytest.approx(own.scalars.losses, rel=2e-7)
    assert {step - 1: norm for step, norm in theirs.scalars.norms.items()} == {
        step: norm for step, norm in own.scalars.norms.items() if step < max(own.scalars.losses) and math.isfinite(norm)
    }


@pytest.mark.parametrize("name", ["flush", "zb-h1", "2bw"])
def test_rows_of_a_file_are_the_preset(name, start, twobw, tmp_path):
    """For more batches than the file has."""
    rows = tmp_path / "rows.csv"
    rows.write_text(Schedule.preset(name, num_stages=2, tied_embeddings=name == "2bw").build((8,) * 4).to_csv())
    file = train(tmp_path / "file", f"{start} --pipeline-program {rows} --rerun-mode disabled", ranks=2)
    preset = twobw if name == "2bw" else train(tmp_path / name, start, ranks=2, schedule=name)
    assert file.scalars == preset.scalars and not different(file.tensors(), preset.tensors())


def test_2bw_does_not_mind_evaluations_and_saves(start, twobw, tmp_path):
    """The pipeline is drained for both, and goes on as if it had not been."""
    disturbed = train(tmp_path, f"{start} --eval-interval 3 --save-interval 4", ranks=2, schedule="2bw")
    assert disturbed.scalars.losses == twobw.scalars.losses
    assert not different(disturbed.tensors(), twobw.tensors())


def test_2bw_recomputes_with_its_dropout_while_it_is_drained(start, tmp_path):
    """An evaluation puts the model into its mode before it drains; the backwards that are left train."""
    flags = f"{start} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    flags += " --hidden-dropout 0.1 --attention-dropout 0.1"
    plain = train(tmp_path / "plain", flags, ranks=2, schedule="2bw")
    # Not every iteration: an evaluation draws from the generators itself, which is theirs to do.
    drained = train(tmp_path / "drained", f"{flags} --save-interval 9", ranks=2, schedule="2bw")
    evaluated = train(tmp_path / "evaluated", f"{flags} --eval-interval 9 --save-interval 9", ranks=2, schedule="2bw")
    assert drained.scalars.losses == plain.scalars.losses
    assert {key: loss for key, loss in evaluated.scalars.losses.items() if key <= 9} == {
        key: loss for key, loss in plain.scalars.losses.items() if key <= 9
    }
    for run in (drained, evaluated):
        saved = checkpoint_tensors(run.save / "iter_0000009")
        assert not different(saved, checkpoint_tensors(drained.save / "iter_0000009"))


@pytest.mark.parametrize("own", [False, pytest.param(True, marks=beside_own_program)])
def test_2bw_resumes_exactly(own, start, twobw, tmp_path):
    """After --exit-interval, from both versions; and under this project's own program."""
    stopped = train(tmp_path / "stopped", f"{start} --exit-interval 6", ranks=2, schedule="2bw")
    resumed = train(tmp_path / "resumed", f"{STAGES} 2 --load {stopped.save}", ranks=2, schedule="2bw", own=own)
    assert "has one weight version" not in resumed.output
    assert not different(resumed.tensors(), twobw.tensors())


def stopped_in_the_third_iteration(folder, flags, number) -> tuple[int, str, float]:
    """The status and the output of a job of 2bw, one of whose ranks alone is sent a signal, and the seconds
    behind that.
    """
    process = subprocess.Popen(
        command_of(folder, flags, ranks=2, schedule="2bw", iterations=10_000), cwd=CHECKOUT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(),
    )  # fmt: skip
    lines = []
    for line in process.stdout:
        lines.append(line)
        if " iteration        3/" in line:
            break
    ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    began = time.monotonic()
    os.kill(int(ranks[-1]), number)
    output = process.communicate(timeout=120)[0]
    return process.returncode, "".join(lines) + output, time.monotonic() - began


def test_2bw_resumes_exactly_after_sigterm(start, twobw, tmp_path):
    """--exit-signal-handler: all ranks save after the same iteration, and end in order."""
    flags = f"{start} --exit-signal-handler"
    status, output, _ = stopped_in_the_third_iteration(tmp_path / "stopped", flags, signal.SIGTERM)
    assert status == 0, output[-6000:]
    [saved] = (tmp_path / "stopped" / "save").glob("iter_*")
    resumed = train(
        tmp_path / "resumed", f"{STAGES} 2 --load {tmp_path}/stopped/save --override-opt-param-scheduler", ranks=2,
        schedule="2bw",
    )  # fmt: skip
    assert 3 < int(saved.name[5:]) < 10 and not different(resumed.tensors(), twobw.tensors())


LONGER = f"{STAGES} 2 --override-opt-param-scheduler --load"


def test_their_checkpoint_under_2bw_is_warned_of(native, tmp_path):
    """It has one weight version."""
    run = train(tmp_path, f"{LONGER} {native('p=2').save}", ranks=2, schedule="2bw", iterations=12)
    assert "iteration 10 was saved under a schedule of Megatron-LM and has one weight version" in run.output


@pytest.mark.parametrize("own", [False, pytest.param(True, marks=beside_own_program)])
def test_checkpoints_of_2bw_go_both_ways(own, twobw, start, tmp_path):
    """That of 2bw, and that of this project's own program, are their own schedule's and flush's alike."""
    saved = train(tmp_path / "own", start, ranks=2, schedule="2bw", own=True) if own else twobw
    native, flush = (
        train(tmp_path / str(name), f"{LONGER} {saved.save}", ranks=2, schedule=name, iterations=12)
        for name in (None, "flush")
    )
    assert sorted(native.scalars.losses) == [11, 12]
    assert flush.scalars == native.scalars and not different(flush.tensors(), native.tensors())


@pytest.mark.parametrize(
    ("flags", "schedule", "sentence"),
    [
        ("--rerun-mode validate_results", "2bw", "--rerun-mode validate_results"),
        ("", "zbv", "--pipeline-schedule zbv places two stages on each rank"),
        (f"{STAGES} 1 --context-parallel-size 2", "flush", "--context-parallel-size 2 cuts the sequence"),
        ("--global-batch-size 2", "2bw", "2bw with 2 stages needs batches of at least 2 microbatches"),
    ],
)
def test_refused_in_one_sentence(flags, schedule, sentence, tmp_path):
    """Once for both ranks, before any process group."""
    refused = train(tmp_path, f"{STAGES} 2 {flags}", ranks=2, schedule=schedule, ends=False)
    assert refused.output.count(f"megatron.pipeline.dropin: error: {sentence}") in (1, 2)  # torchrun repeats it
    assert "initializing torch distributed" not in refused.output
    assert refused.output.count("Traceback") == 1  # torchrun's own


def test_a_rank_that_dies_ends_the_job(start, tmp_path):
    """In seconds, and the other says whose end it was."""
    status, output, seconds = stopped_in_the_third_iteration(tmp_path, start, signal.SIGKILL)
    assert status != 0 and seconds < 30 and "rank 1" in output


def test_timeline_and_saved_activations(start, tmp_path):
    """bpipe's picture is drawn, and stage 0 saves fewer microbatches than under flush."""
    flags = (
        f"{STAGES} 4 --pipeline-log-saved-activations --global-batch-size 16 --pipeline-timeline {tmp_path}/timeline"
    )
    run = train(tmp_path, flags, ranks=4, schedule="bpipe", iterations=4)
    assert (tmp_path / "timeline" / "timeline.png").is_file() and (tmp_path / "timeline" / "trace.json").is_file()
    assert "pipeline rank 0 saved at most" in run.output and "3 microbatches at stage 0" in run.output


def test_read_scalars_reads_what_was_written(native):
    """The comparison is of numbers, not of nothing."""
    run = native("p=2")
    assert sorted(run.scalars.losses) == sorted(run.scalars.norms) == list(range(1, 11))
    assert len(run.tensors()) > 40 and read_scalars(run.save.parent / "board") == run.scalars
