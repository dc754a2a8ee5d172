"""What is trained besides a GPT, from flags to losses: BERT, a BERT that tells classes, and a ViT. Each has one result
however the job is cut, and goes on where it has stopped."""

import functools
import math

import pytest
import torch

from tests.trainer.run import test_bert, vision_helper
from tests.trainer.run.run_case import joined_weights
from tests.trainer.run.test_bert import train_bert
from tests.trainer.run.text_helper import train_texts
from tests.trainer.run.vision_helper import norms, train_vision

PROGRAMS = {  # how it is trained, and what is recorded of each batch and evaluation
    "bert": (train_bert, test_bert.numbers),
    "texts": (train_texts, vision_helper.numbers),
    "images": (train_vision, vision_helper.numbers),
}
CLASSIFIERS = ["images", "texts"]


@functools.cache
def alone(program: str, schedule: str = "flush") -> list[dict]:
    """A single process, with dropout, under a schedule without delay or with one."""
    return PROGRAMS[program][0](1, f"--pipeline-schedule {schedule}")


@pytest.mark.full
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    "stages, schedule",
    [
        (4, "bpipe"),
        (4, "2bw"),
        (2, "interleaved --num-virtual-stages-per-pipeline-rank 2"),
        (2, "flush"),
        (2, "gpipe"),
        (2, "zb-h1"),
        (2, "l2l"),
        (1, "l2l"),
    ],
)
def test_the_pipeline_changes_nothing(program, stages, schedule):
    """Losses, hits and weights of p stages, with dropout and evaluations, are bit-equal to a single process's; squares
    of norms are added in another order."""
    train, numbers = PROGRAMS[program]
    reference = alone(program, "2bw" if schedule == "2bw" else "flush")
    found = train(stages, f"--pipeline-schedule {schedule}")
    assert numbers(found) == numbers(reference)
    assert norms(found) == pytest.approx(norms(reference), rel=1e-12)
    weights = joined_weights(reference)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in joined_weights(found).items())
    losses = reference[0]["losses"]
    assert len(losses) == 6 and all(map(math.isfinite, losses.values()))
    assert program == "texts" or losses[6] < losses[1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("program", CLASSIFIERS)
def test_an_evaluation_takes_every_sample_once(program):
    """Whatever is missing in the last batch: accuracies are whole numbers of the samples."""
    records = alone(program)[0]["records"]
    sizes = {"validation_accuracy": vision_helper.NUM_VALIDATION, "test_accuracy": vision_helper.NUM_TEST}
    found = [(name, record[name] * size) for record in records for name, size in sizes.items() if name in record]
    assert [name for name, _ in found].count("validation_accuracy") == 2
    assert ("test_accuracy" in dict(found)) == (program == "images")
    assert all(number == pytest.approx(round(number), abs=1e-9) for _, number in found)
    assert "validation_ppl" not in records[-1]


@pytest.mark.full
@pytest.mark.parametrize("program", ["bert", "images", "texts"])
def test_replicas_learn_what_one_process_learns(program):
    """Two replicas have the losses and hits of a single process, but for the order of sums: each microbatch counts
    alike, whichever replica has it."""
    train, numbers = PROGRAMS[program]
    found, expected = numbers(train(2, "--pipeline-model-parallel-size 1")), numbers(alone(program))
    rounding = 1e-4 if program == "texts" else 1e-5  # six steps spread it, and their losses are small
    for ours, theirs in zip(found, expected, strict=True):
        assert [each or 0.0 for each in ours] == pytest.approx([each or 0.0 for each in theirs], rel=rounding)


@pytest.mark.full
@pytest.mark.parametrize("program", ["images", "texts", "bert"])
@pytest.mark.parametrize("flags", ["--pipeline-schedule 2bw", ""])
def test_a_resumed_run_goes_on(tmp_path, program, flags):
    """Saved in the middle of an epoch and started anew: losses, evaluations and weights are those of the whole run."""
    train, numbers = PROGRAMS[program]
    whole = train(2, f"{flags} --save {tmp_path} --save-interval 3")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = train(2, f"{flags} --load {tmp_path}")
    assert numbers(resumed) == [record for record in numbers(whole) if record[0] > 3]
    for ours, theirs in zip(resumed, whole, strict=True):
        assert all(torch.equal(tensor, ours["weights"][name]) for name, tensor in theirs["weights"].items())


@pytest.mark.full
@pytest.mark.parametrize("program", CLASSIFIERS)
@pytest.mark.parametrize(
    "flags",
    [
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-activations",
        "--pipeline-recompute",
    ],
)
def test_recomputing_changes_nothing(program, flags):
    """Two stages that recompute, the head's dropout included, are bit-equal to one that keeps all."""
    train, numbers = PROGRAMS[program]
    assert numbers(train(2, flags)) == numbers(alone(program))


@pytest.mark.full
@pytest.mark.parametrize("program", CLASSIFIERS)
@pytest.mark.parametrize("flags", ["--bf16", "--fp16 --initial-loss-scale 1024"])
def test_stages_on_the_last_rank_that_are_not_the_last(program, flags):
    """In 16 bits, what a frozen stage beside the last one puts out, or one of several that are trained, stays so: two
    ranks have the numbers of one.
    """
    train, numbers = PROGRAMS[program]
    freezes = (
        f"{flags} --untie-embeddings-and-output-weights --freeze-training --freeze-interval 2 --freeze-schedule 1,3"
    )
    assert numbers(train(2, freezes)) == numbers(train(1, freezes))
    turns = train(2, f"{flags} --num-layers-per-virtual-pipeline-stage 1 --pipeline-schedule interleaved")
    assert numbers(turns) == numbers(train(1, flags))


TWO_BW = "--pipeline-schedule 2bw"
TENSOR = f"--tensor-model-parallel-size 2 --sequence-parallel {TWO_BW}"
SHARDED = f"--use-distributed-optimizer {TWO_BW} --pipeline-model-parallel-size 1"
LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear --qk-layernorm"
FEATURES = [
    ("images", f"{TENSOR} --disable-vision-class-token"),
    ("texts", TENSOR),
    ("bert", TENSOR),
    ("bert", f"--bert-no-binary-head {TWO_BW}"),
    ("bert", "--fp16 --initial-loss-scale 1024 --lr 1e-3"),
    ("bert", "--position-embedding-type rope --swiglu --disable-bias-linear"),
    ("images", "--fp16 --initial-loss-scale 1024 --lr 1e-3"),
    ("images", SHARDED),
    ("images", LLAMA),
    ("images", "--num-workers 1 --micro-batch-size 2 --clip-grad 1.0"),
    ("images", f"{TWO_BW} --2bw-provisional stage"),
    ("images", "--decoupled-lr 1e-3"),
    ("texts", f"--bf16 {TWO_BW}"),
    ("texts", SHARDED),
    ("texts", "--position-embedding-type rope --swiglu --disable-bias-linear"),
    ("texts", "--num-workers 1 --micro-batch-size 2 --clip-grad 1.0 --bert-no-binary-head"),
]


@pytest.mark.full
@pytest.mark.parametrize("program, flags", FEATURES)
def test_feature_trains_on_two_stages(program, flags):
    """p=2 (or d=2): every loss is finite, and the last lies below the first; of noisy texts the mean of three."""
    noisy = program == "texts"
    if noisy:
        flags = f"--lr 3e-3 --hidden-dropout 0 --attention-dropout 0 {flags}"
    degrees = "" if "--pipeline-model-parallel-size" in flags else "--pipeline-model-parallel-size 2"
    losses = PROGRAMS[program][0](4 if "tensor" in flags else 2, f"{degrees} {flags}")[-1]["losses"]
    assert len(losses) == 6 and all(map(math.isfinite, losses.values()))
    assert (sum(losses[each] for each in (4, 5, 6)) / 3 if noisy else losses[6]) < losses[1]
