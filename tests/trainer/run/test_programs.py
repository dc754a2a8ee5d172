"""Runs of programs that users bring: what they compute is what one process computes, however they are stopped."""

from pathlib import Path

import pytest
import torch

from megatron.pipeline.program.edges import v
from megatron.pipeline.schedules import Schedule, read_schedule
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.synthesis import Problem, synthesize, synthesize_steady
from tests.pipeline.brought_programs import (
    FOLDED,
    HALVES,
    KEPT,
    KEPT_AND_EVICTIONS,
    KEPT_AND_SWAPS,
    RHYTHM,
    SWAPS,
    TORCH,
    WHOLE,
    hurried_2bw,
    swapped,
    written,
)
from tests.trainer.run.run_case import joined_weights, table, train
from tests.trainer.run.test_virtual_stages import CLIPPED, EXACT, TENSOR, TWO_BW, UNDROPPED, check, single, values

FOUR = f"{EXACT} --global-batch-size 4"  # microbatches of one sample

PROGRAMS = {  # flags of the single process
    "folded": (FOLDED, f"{FOUR} {TWO_BW}"),
    "halves": (HALVES, FOUR),
    "kept": (KEPT, f"{FOUR} --pipeline-recompute"),
    "kept and swaps": (KEPT_AND_SWAPS, f"{FOUR} --pipeline-recompute"),
    "kept and evictions": (KEPT_AND_EVICTIONS, f"{FOUR} --pipeline-recompute"),
    "rhythm": (RHYTHM, f"{FOUR} {TWO_BW}"),
    "torch": (TORCH, FOUR),
    "whole": (WHOLE, FOUR),
    "hurried": (hurried_2bw(), f"{FOUR} {TWO_BW}"),
    "swaps": (SWAPS, FOUR),
    "swaps, 2bw": (swapped(Schedule.preset("2bw", num_stages=2).build((4,) * 4)).to_csv(), f"{FOUR} {TWO_BW}"),
}


def flags_of(model: str, path: Path) -> str:
    """The same model, trained with the rows of a file."""
    return f"{model.replace(TWO_BW, '')} --pipeline-program {path}"


def validation_losses(results: list[dict]) -> dict[int, float]:
    """By iteration."""
    records = results[-1]["records"]
    return {each["iteration"]: each["validation_loss"] for each in records if "validation_loss" in each}


@table("text, model", PROGRAMS, usual=1)
def test_a_program_trains_what_one_process_trains(text, model, tmp_path):
    """With dropout, untied and unclipped, each is another order than any preset's: losses and weights are bit-equal."""
    expected, weights = single(model)
    results = train(2, flags_of(model, written(tmp_path, text)))
    assert values(results)["lm_loss"] == expected["lm_loss"]
    found = joined_weights(results)
    assert found.keys() == weights.keys()
    assert not [each for each, tensor in weights.items() if not torch.equal(found[each], tensor)]


@table("text, model", PROGRAMS, usual=1)
def test_a_run_that_is_stopped_goes_on_exactly(text, model, tmp_path):
    """Evaluations, saves, a request to stop on one rank and a resume: losses and weights stay those of one process."""
    expected, weights = single(model)
    flags = flags_of(model, written(tmp_path, text))
    flags = f"{flags} --eval-iters 1 --eval-interval 2 --save {tmp_path}/saved --save-interval 2"
    first = train(2, flags, stop_after={1: 3})
    assert first[0]["iteration"] < 6 and first[0]["iteration"] == first[1]["iteration"]
    rest = train(2, f"{flags} --load {tmp_path}/saved")
    assert rest[0]["iteration"] == 6
    losses = values(first)["lm_loss"] + values(rest)["lm_loss"]
    assert losses == expected["lm_loss"]
    found = joined_weights(rest)
    assert not [each for each, tensor in weights.items() if not torch.equal(found[each], tensor)]
    [alone] = train(1, f"{model} --eval-iters 1 --eval-interval 2")
    by_one, evaluated = validation_losses([alone]), validation_losses(first)  # the rest has other samples
    assert 2 in evaluated and all(by_one[iteration] == loss for iteration, loss in evaluated.items())


def test_stages_that_disagree_in_the_order_of_forwards_read_the_same_samples(tmp_path):
    """The last stage takes the labels of a microbatch whose tokens the first one took, in whichever order."""
    rows = "0F0,0F1,1F1,1F0,1B0,1B1,0B0,0B1,0F3,0F2,1F2,1F3,1B2,0B2,1B3,0B3\n"
    check(1, FOUR, f"--pipeline-program {written(tmp_path, rows)}", exact=True)


ROW = "num_ranks, text, model, layout"  # flags of the single process, flags of the layout
CLOSE = {
    "torch, d=2": (4, TORCH, CLIPPED, "--use-distributed-optimizer"),
    "folded": (2, FOLDED, f"{CLIPPED} {TWO_BW}", ""),
    "rhythm, t=2": (4, RHYTHM, f"{CLIPPED} {UNDROPPED} {TWO_BW}", TENSOR),
    "folded, d=2": (4, FOLDED, f"{CLIPPED} {TWO_BW}", "--use-distributed-optimizer"),
    "torch, recompute": (2, TORCH, CLIPPED, "--pipeline-recompute"),
}


@table(ROW, CLOSE, usual=0)
def test_a_program_agrees_with_one_process(num_ranks, text, model, layout, tmp_path):
    """Tied embeddings, clipping, replicas and tensor ranks: what the rows leave to the run is added, and the result is
    equal to rounding.
    """
    model = f"{model} --global-batch-size {4 * (num_ranks // 2 if 'distributed' in layout else 1)}"
    pipeline = f"--pipeline-model-parallel-size 2 --pipeline-program {written(tmp_path, text)}"
    check(num_ranks, model, f"{pipeline} {layout}", exact=False, without=TWO_BW)


BOUNDED = {
    "gpipe": (2, f"{EXACT} --global-batch-size 6", "--pipeline-schedule gpipe"),
    "2bw": (4, f"{EXACT} {TWO_BW} --global-batch-size 8", ""),
    "clipped, recompute": (2, f"{EXACT} --global-batch-size 6", "--pipeline-schedule gpipe --pipeline-recompute"),
}


@pytest.mark.full
@table("num_ranks, model, layout", BOUNDED, usual=1)
def test_what_waits_on_the_host_changes_no_number(num_ranks, model, layout, capfd):
    """A bound of three microbatches on each device is bit-equal to one process, whose device holds them all."""
    layout += f" --pipeline-model-parallel-size {num_ranks} --pipeline-offload-activations 3"
    check(num_ranks, model, layout, exact=True)
    assert "nothing to move" not in capfd.readouterr().out


THREE = """\
# rank_of_stage: 0 1 0
0F0,0F1,2F0,2B0,0F2,2F1,2B1,0F3,0B0,2F2,0B1,2B2,2F3,2B3,0B2,0B3
1F0,1F1,1B0,1B1,1F2,1F3,1B2,1B3
"""
ALONE = "0F0,1F0,1B0,0F1,0B0,1F1,1B1,0B1,0F2,0F3,1F2,1F3,1B2,0B2,1B3,0B3\n"
BALANCED = Schedule.preset("bpipe", num_stages=4).build((8,)).to_csv()

ELSEWHERE = {
    "numbers of stages that differ": (2, THREE, f"{FOUR} --num-layers 3", ""),
    "two stages on the only rank": (1, ALONE, FOUR, ""),
    "activations that move": (4, BALANCED, f"{EXACT} --global-batch-size 8", ""),
    "a layout": (2, FOLDED, f"{FOUR} {TWO_BW}", "--pipeline-model-parallel-layout Et|t|t|tL"),
    "one gradient buffer": (2, RHYTHM, f"{FOUR} {TWO_BW}", "--2bw-single-gradient-buffer"),
}


@table(ROW, ELSEWHERE, usual=0)
def test_stages_wherever_the_file_has_them(num_ranks, text, model, layout, tmp_path):
    """Uneven numbers of stages, one rank, moves of activations, a cut of one's own: bit-equal to one process."""
    layout += f" --pipeline-model-parallel-size {num_ranks} --pipeline-program {written(tmp_path, text)}"
    check(num_ranks, model, layout, exact=True, without=TWO_BW)


@pytest.mark.full
@pytest.mark.parametrize(("text", "flags"), [
    (Schedule.preset("pipedream", num_stages=2).build((1,) * 8).to_csv(),
     "--global-batch-size 1 --pipeline-schedule pipedream"),
    (Schedule.preset("2bw", num_stages=2, predict=True).build((4,) * 5).to_csv(),
     "--global-batch-size 4 --pipeline-schedule 2bw --2bw-provisional stage"),
])  # fmt: skip
def test_files_that_the_tool_writes_train_like_their_preset(text, flags, tmp_path):
    """Weights that are stashed, and predicted ones, too."""
    flags, path = f"{EXACT} --train-iters 12 {flags}", written(tmp_path, text)
    alone = flags[: flags.index("--pipeline-schedule")]
    preset, brought = train(2, flags), train(2, f"{alone} --pipeline-program {path}")
    assert values(preset)["lm_loss"] == values(brought)["lm_loss"]


@pytest.mark.full
def test_logs_and_checkpoints_carry_the_hash(tmp_path):
    """The first lines say which program runs and how it repeats; one that goes on from a checkpoint of another, or of a
    preset, says so, and its numbers are those of a run that did not change."""
    expected, _ = single(FOUR)
    path, other = written(tmp_path, TORCH), tmp_path / "whole.csv"
    other.write_text(WHOLE)
    hashes = [read_schedule(each).sha256 for each in (path, other)]
    saved = f"--save {tmp_path}/saved --save-interval 2"
    first = train(2, f"{flags_of(FOUR, path)} {saved} --exit-interval 2")
    second = train(2, f"{flags_of(FOUR, other)} {saved} --load {tmp_path}/saved --exit-interval 4")
    third = train(2, f"{FOUR} --load {tmp_path}/saved")
    assert [value for run in (first, second, third) for value in values(run)["lm_loss"]] == expected["lm_loss"]
    said = ["\n".join(run[-1]["lines"]) for run in (first, second, third)]
    assert f"program {path} (sha256 {hashes[0][:12]})" in said[0]
    assert f"was saved under program {hashes[0][:12]}; the run goes on with program {hashes[1][:12]}" in said[1]
    assert f"was saved under program {hashes[1][:12]}; the run goes on with schedule flush" in said[2]


@pytest.mark.full
def test_a_synthesized_program_trains_what_one_process_trains(tmp_path):
    """Rows for a large head and little memory add up gradients as `flush` does. The file leaves to the run whether
    embeddings are tied and replicas reduce.
    """
    costs = Costs(forward=[1.0, 2.0], backward=[2.0, 4.0])
    found = synthesize(Problem(rank_of_stage=(0, 1), num_microbatches=4, costs=costs, limits=1.5), rounds=2)
    layout = f"--pipeline-model-parallel-size 2 --pipeline-program {written(tmp_path, found.csv)}"
    check(2, FOUR, layout, exact=True)
    check(4, f"{CLIPPED} --global-batch-size 8", layout, exact=False)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("moves", "latency"), [("host", 2.0), ("pair", 4.0)])
def test_a_synthesized_program_with_moves_trains_what_one_process_trains(moves, latency, tmp_path):
    """Backwards in halves, and microbatches that wait on the host or on the other rank: bit-equal to one process."""
    costs = Costs(latency=latency, swap_out=0.25, evict=0.25)
    problem = Problem(rank_of_stage=(0, 1), num_microbatches=4, costs=costs, limits=3.0)
    found = synthesize(problem, moves=moves, rounds=1)
    assert found.way.name == moves and 3 in found.moved[0]
    layout = f"--pipeline-model-parallel-size 2 --pipeline-program {written(tmp_path, found.csv)}"
    check(2, FOUR, layout, exact=True)


def test_a_synthesized_program_that_does_not_drain_trains_what_one_process_trains(tmp_path):
    """Under 2bw, two stages on each rank in a V, for which there is no preset: stopped and resumed, too."""
    costs = Costs(forward=[1.0, 1.0, 1.0, 2.0], backward=[2.0, 2.0, 2.0, 4.0])
    found = synthesize_steady(Problem(rank_of_stage=v(2, 2), num_microbatches=4, costs=costs, saved=0.5), rounds=2)
    expected, weights = single(f"{FOUR} {TWO_BW}")
    flags = f"{FOUR} --pipeline-program {written(tmp_path, found.csv)} --save {tmp_path}/saved"
    first = train(2, f"{flags} --exit-interval 3")
    rest = train(2, f"{flags} --load {tmp_path}/saved")
    assert values(first)["lm_loss"] + values(rest)["lm_loss"] == expected["lm_loss"]
    trained = joined_weights(rest)
    assert not [each for each, tensor in weights.items() if not torch.equal(trained[each], tensor)]
