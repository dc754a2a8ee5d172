"""`--pipeline-program` and the other flags: what fits, and what is refused with a remedy."""

import re

import pytest

from megatron.pipeline.schedules import Schedule, read_schedule
from megatron.trainer.arguments import parse_args, validate_args
from megatron.trainer.arguments.rules.stages import layer_split
from tests.pipeline.brought_programs import FOLDED, TORCH, WHOLE, hurried_2bw, written
from tests.trainer.arguments.command_line import arguments, argv

P2 = "--pipeline-model-parallel-size 2"
UNTIED = "--untie-embeddings-and-output-weights"
FITS = f"{P2} {UNTIED} --global-batch-size 4"
TIED = Schedule.preset("flush", num_stages=2, tied_embeddings=True).build((4,)).to_csv()
REPLICAS = Schedule.preset("flush", num_stages=2, data_parallel=True).build((4,)).to_csv()
RECOMPUTES = Schedule.preset("flush", num_stages=2, recompute=True).build((4,)).to_csv()
THREE = "# rank_of_stage: 0 1 0\n0F0,2F0,2B0,0B0\n1F0,1B0\n"
RELAY = Schedule.preset("l2l", num_stages=4, num_virtual_stages=2).build((4,)).to_csv()


def test_the_schedule_is_the_files(tmp_path):
    """What the file leaves to the run follows from the flags; the run's batches are its batches."""
    path = written(tmp_path, TORCH)
    args = arguments(f"{P2} --global-batch-size 8 --pipeline-program {path} --pipeline-recompute", world_size=4)
    assert args.schedule == read_schedule(path, recompute=True, tied_embeddings=True, data_parallel=True)
    assert args.pipeline_program_sha256 == args.schedule.sha256 and not args.moves_activations
    assert args.schedule != read_schedule(path)


@pytest.mark.parametrize(
    ("text", "flags", "num_layers", "split"),
    [
        (FOLDED, FITS, 4, (4, None)),
        (THREE, f"{P2} {UNTIED} --global-batch-size 1", 3, (3, None)),
        ("0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n", f"{P2} {UNTIED} --global-batch-size 1", 4, (2, 2)),
        ("0F0,1F0,1B0,0B0\n", "--global-batch-size 1", 4, (2, None)),
    ],
)
def test_layers_follow_the_stages_of_the_file(text, flags, num_layers, split, tmp_path):
    """Stages dealt out in turn are megatron.core's; any others are cut as if each had a rank."""
    flags = f"{flags} --num-layers {num_layers} --pipeline-program {written(tmp_path, text)}"
    args = arguments(flags, world_size=2 if P2 in flags else 1)
    assert layer_split(args) == split


@pytest.mark.parametrize(
    ("text", "flags", "world_size", "reason"),
    [
        (TORCH, FITS.replace(P2, ""), 1, "rows for 2 ranks, and --pipeline-model-parallel-size is 1; make it 2"),
        (TORCH, FITS.replace("size 4", "size 8"), 2, "batches of 4 microbatches, not 8"),
        (TORCH, f"{FITS} --rampup-batch-size 2 2 8", 2, "batches of 4 microbatches, not 2"),
        (TORCH, f"{FITS} --pipeline-schedule flush", 2, "--pipeline-schedule flush: the program of"),
        (TORCH, f"{FITS} --num-virtual-stages-per-pipeline-rank 2", 2, "says how many stages each rank has"),
        (TORCH, f"{FITS} --balance-activations", 2, "--balance-activations: the program of"),
        (TORCH, f"{FITS} --pipeline-offload-activations 3", 2, "says which activations wait on the host"),
        (TORCH, f"{FITS} --pipeline-extra-warmup", 2, "says how far ahead each rank runs"),
        (TORCH, f"{FITS} --freeze-training --freeze-interval 2", 2, "--freeze-training: the program of"),
        (TORCH, f"{FITS} --elastic-pipeline --freeze-interval 2", 2, "--elastic-pipeline: the program of"),
        (TORCH, f"{FITS} --l2l-update eager", 2, "--l2l-update eager: the program of"),
        (TORCH, f"{FITS} --2bw-provisional stage", 2, "--2bw-provisional stage: the program of"),
        (TORCH, f"{FITS} --pipeline-model-parallel-layout E|tt|tt|L", 2, "has 4 stages, and --pipeline-program"),
        (WHOLE, f"{FITS} --pipeline-recompute", 2, "has no recomputes, and the run asks for them"),
        (WHOLE, FITS.replace(UNTIED, ""), 2, "add --untie-embeddings-and-output-weights"),
        (WHOLE, FITS.replace("size 4", "size 8"), 4, "does not reduce gradients over replicas, and the run has some"),
        (RECOMPUTES, FITS, 2, "or add --pipeline-recompute"),
        (TIED, FITS, 2, "or leave out --untie-embeddings-and-output-weights"),
        (REPLICAS, FITS, 2, "reduces gradients over replicas, and the run has one"),
        (f"# data: 3\n{TORCH}", FITS, 2, "data parallel degree 3 (# data: 3), and the job has 1"),
        (f"# tensor: 2\n{TORCH}", FITS, 2, "tensor parallel degree 2 (# tensor: 2), and the job has 1"),
        (RELAY, FITS, 2, "weights live on the host (residency)"),
        ("# edges: 0>1 0>2 1>2\n0F0,0B0\n1F0,2F0,2B0,1B0\n", FITS, 2, "this program's models are a chain"),
        ("# weights: stale\n# batches: 1 1 1 1\n0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n",
         FITS, 2, "each stage steps by itself"),
        ("# weights: stash\n# batches: 1 1 1\n0F0,0B0,0F1,0B1,0F2,0B2\n", "--global-batch-size 1", 1, "--clip-grad 0"),
        (TORCH.replace("1B1,", ""), FITS, 2, "rank 1, position 1, 1F1: its backward has not run: the row has no 1B1"),
        ("0F0,nonsense\n", FITS, 2, "row 0 (line 1), column 2"),
    ],
)  # fmt: skip
def test_what_disagrees_is_refused(text, flags, world_size, reason, tmp_path):
    """In one sentence that names both sides, and the file."""
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        validate_args(parse_args(argv(f"{flags} --pipeline-program {path}")), world_size=world_size)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    """So is a path that names nothing, or is empty."""
    with pytest.raises(ValueError, match="cannot be read"):
        arguments(f"{FITS} --pipeline-program {tmp_path}/none.csv", world_size=2)
    with pytest.raises(ValueError, match="--pipeline-program is empty"):
        validate_args(parse_args([*argv(FITS), "--pipeline-program", ""]), world_size=2)


def test_what_the_log_says(tmp_path):
    """How the rows repeat is said at the start, for the user may have meant otherwise."""
    path = written(tmp_path, hurried_2bw(num_batches=4))
    notes = validate_args(parse_args(argv(f"{FITS} --pipeline-program {path}")), world_size=2)
    assert any("all batches behind the first run alike" in note for note in notes)
    path = written(tmp_path, hurried_2bw(num_batches=2))
    notes = validate_args(parse_args(argv(f"{FITS} --pipeline-program {path}")), world_size=2)
    assert any("every 2 batches run alike; the pipeline drains with them" in note for note in notes)
