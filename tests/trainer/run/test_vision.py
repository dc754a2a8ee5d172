"""pretrain_vision_classify.py from flags to losses: one result however the job is cut, and what it refuses."""

import functools
import math

import pytest
import torch

from megatron import backend

backend.install()

from megatron.trainer.arguments import parse_args, validate_args
from tests.trainer.arguments.command_line import argv
from tests.trainer.run.run_case import joined_weights
from tests.trainer.run.vision_helper import (
    NUM_TEST,
    NUM_VALIDATION,
    defaults,
    norms,
    numbers,
    train_vision,
    vision_arguments,
)


@functools.cache
def vision_alone(schedule: str = "flush") -> list[dict]:
    """A single process, with dropout, under a schedule without delay or with one."""
    return train_vision(1, f"--pipeline-schedule {schedule}")


@pytest.mark.parametrize(
    "stages, schedule",
    [
        (2, "flush"),
        (2, "interleaved --num-virtual-stages-per-pipeline-rank 2"),
        (4, "bpipe"),
        pytest.param(4, "2bw", marks=pytest.mark.full),  # test_a_resumed_run_goes_on has it, too
        pytest.param(2, "2bw", marks=pytest.mark.full),
        pytest.param(2, "gpipe", marks=pytest.mark.full),
        pytest.param(4, "gpipe", marks=pytest.mark.full),
        pytest.param(2, "l2l", marks=pytest.mark.full),
        pytest.param(1, "l2l", marks=pytest.mark.full),
    ],
)
def test_the_pipeline_changes_nothing(stages, schedule):
    """Losses, hits and weights of p stages, with dropout and evaluations, are bit-equal to a single process's; squares
    of norms are added in another order."""
    reference = vision_alone("2bw" if schedule == "2bw" else "flush")
    found = train_vision(stages, f"--pipeline-schedule {schedule}")
    assert numbers(found) == numbers(reference)
    assert norms(found) == pytest.approx(norms(reference), rel=1e-12)
    weights = joined_weights(reference)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in joined_weights(found).items())
    assert len(reference[0]["losses"]) == 6 and reference[0]["losses"][6] < reference[0]["losses"][1]


def test_an_evaluation_takes_every_sample_once():
    """Whatever is missing in the last batch: accuracies are whole numbers of the samples, the same for replicas."""
    records = vision_alone()[0]["records"]
    validations = [record["validation_accuracy"] for record in records if "validation_accuracy" in record]
    (test,) = (record["test_accuracy"] for record in records if "test_accuracy" in record)
    assert len(validations) == 2
    for accuracy, number in [*((each, NUM_VALIDATION) for each in validations), (test, NUM_TEST)]:
        assert accuracy * number == pytest.approx(round(accuracy * number), abs=1e-9)
    assert "validation_ppl" not in records[-1]


def test_replicas_learn_what_one_process_learns():
    """Two replicas have the losses and hits of a single process, but for the order of sums."""
    found, expected = numbers(train_vision(2, "--pipeline-model-parallel-size 1")), numbers(vision_alone())
    for ours, theirs in zip(found, expected, strict=True):
        assert [each or 0.0 for each in ours] == pytest.approx([each or 0.0 for each in theirs], rel=1e-5)


@pytest.mark.parametrize("flags", ["--pipeline-schedule 2bw", pytest.param("", marks=pytest.mark.full)])
def test_a_resumed_run_goes_on(tmp_path, flags):
    """Saved in the middle of an epoch and started anew: losses, evaluations and weights are those of the whole run."""
    whole = train_vision(2, f"{flags} --save {tmp_path} --save-interval 3")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = train_vision(2, f"{flags} --load {tmp_path}")
    assert numbers(resumed) == [record for record in numbers(whole) if record[0] > 3]
    for ours, theirs in zip(resumed, whole, strict=True):
        assert all(torch.equal(tensor, ours["weights"][name]) for name, tensor in theirs["weights"].items())


def test_the_head_is_new_where_the_body_is_not(tmp_path):
    """--pretrained-checkpoint brings all weights but the head's, for another number of classes, at other degrees."""
    learned = train_vision(1, f"--save {tmp_path}")[0]["weights"]
    fresh = train_vision(2, "--skip-train --num-classes 5")
    found = train_vision(2, f"--pretrained-checkpoint {tmp_path} --skip-train --num-classes 5")
    weights = {name: tensor for result in found for name, tensor in result["weights"].items()}
    drawn = {name: tensor for result in fresh for name, tensor in result["weights"].items()}
    assert weights.keys() == learned.keys()
    for name, tensor in weights.items():
        expected = drawn if name.startswith("classification_head.") else learned
        assert torch.equal(tensor, expected[name]), name
    assert any("but for the head" in line for line in found[-1]["lines"])
    assert not torch.equal(learned["embedding.projection.weight"], drawn["embedding.projection.weight"])


def test_epochs_are_the_length_of_a_run():
    """20 samples in batches of 8, three times: 8 batches, with an evaluation behind each epoch, on the third batch."""
    epochs = train_vision(1, "--epochs 3 --lr-decay-style linear")
    assert epochs[0]["iteration"] == 8
    assert numbers(epochs) == numbers(train_vision(1, "--train-iters 8 --lr-decay-style linear"))


@pytest.mark.parametrize(
    "flags",
    [
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        pytest.param("--recompute-activations", marks=pytest.mark.full),
        pytest.param("--pipeline-recompute", marks=pytest.mark.full),
    ],
)
def test_recomputing_changes_nothing(flags):
    """Two stages that recompute, dropout included, are bit-equal to one that keeps all."""
    assert numbers(train_vision(2, flags)) == numbers(vision_alone())


QUICK = ("bf16", "tensor and sequence")
FEATURES = {
    "bf16": "--bf16 --pipeline-schedule 2bw",
    "fp16": "--fp16 --initial-loss-scale 1024 --lr 1e-3",
    "tensor": "--tensor-model-parallel-size 2",
    "tensor and sequence": "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-schedule 2bw "
                           "--disable-vision-class-token",
    "distributed optimizer": "--use-distributed-optimizer --pipeline-schedule 2bw --pipeline-model-parallel-size 1",
    "llama's layer": "--swiglu --normalization RMSNorm --disable-bias-linear --qk-layernorm",
    "loading workers": "--num-workers 1 --micro-batch-size 2 --clip-grad 1.0",
    "uneven stages": "--decoder-first-pipeline-num-layers 1",
    "provisional": "--pipeline-schedule 2bw --2bw-provisional stage",
    "learning rates": "--decoupled-lr 1e-3",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in FEATURES]
)
def test_feature_trains_on_two_stages(name):
    """p=2 (or d=2): every loss is finite, and the last lies below the first."""
    flags = FEATURES[name]
    ranks = 4 if "tensor" in name else 2
    degrees = "" if "--pipeline-model-parallel-size" in flags else "--pipeline-model-parallel-size 2"
    losses = train_vision(ranks, f"{degrees} {flags}")[-1]["losses"]
    assert len(losses) == 6 and all(map(math.isfinite, losses.values()))
    assert losses[6] < losses[1]


SIXTEEN_BITS = ("--bf16", pytest.param("--fp16 --initial-loss-scale 1024", marks=pytest.mark.full))


@pytest.mark.parametrize("flags", SIXTEEN_BITS)
def test_stages_on_the_last_rank_that_are_not_the_last(flags):
    """In 16 bits, what a frozen stage beside the last one puts out, or one of several that are trained, stays so: two
    ranks have the numbers of one.
    """
    freezes = (
        f"{flags} --untie-embeddings-and-output-weights --freeze-training --freeze-interval 2 --freeze-schedule 1,3"
    )
    assert numbers(train_vision(2, freezes)) == numbers(train_vision(1, freezes))
    turns = train_vision(2, f"{flags} --num-layers-per-virtual-pipeline-stage 1 --pipeline-schedule interleaved")
    assert numbers(turns) == numbers(train_vision(1, flags))


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--mock-data", "--mock-data: there are no synthetic samples with classes"),
        ("--split 9,1", "--split 9,1: training and validation have files of their own"),
        ("--tokenizer-type NullTokenizer", "--tokenizer-type: images have no tokenizer"),
        ("--position-embedding-type rope", "--position-embedding-type rope: the positions of patches are learned"),
        ("--patch-dim 3", "--img-h 8 is not divisible by --patch-dim 3"),
        ("--patch-dim 0", "--patch-dim 0 must be greater than 0"),
        ("--calculate-per-token-loss", "--calculate-per-token-loss: a sample has one loss"),
        ("--train-data-path a", "--data-path and --train-data-path exclude each other"),
        ("--data-path a b c d", "--data-path a b c d names 4 places"),
        ("--epochs 2", "--train-iters and --epochs exclude each other"),
        ("--mask-prob 0.1", "--mask-prob belongs to pretrain_bert.py"),
        ("--bert-no-binary-head", "--bert-no-binary-head belongs to pretrain_bert.py"),
        ("--data-path none also-none", "file also-none does not exist"),
    ],
)
def test_what_a_vit_does_not_have_is_refused(flags, message):
    """Flags of other programs, and images that make no whole patches, are refused in a sentence."""
    with pytest.raises(ValueError) as caught:
        vision_arguments(flags)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("flag", ["--img-h 8", "--num-classes 3", "--epochs 2", "--disable-vision-class-token"])
def test_flags_of_classifiers_belong_to_them(flag):
    """pretrain_gpt.py refuses them."""
    with pytest.raises(ValueError, match=rf"{flag.split()[0]} belongs to pretrain_vision_classify\.py.*; leave it out"):
        validate_args(parse_args(argv(flag)), world_size=1)


def test_the_sequence_follows_from_the_images():
    """Patches and the class token, whatever --seq-length says, as scripts of Megatron-LM do; its vision flags pass."""
    assert vision_arguments().seq_length == 5
    assert vision_arguments("--disable-vision-class-token --patch-dim 2").seq_length == 16
    flags = (
        "--vision-pretraining --vision-pretraining-type classify --vision-backbone-type vit --num-layers 12 "
        "--hidden-size 768 --num-attention-heads 12 --micro-batch-size 4 --seq-length 3136 --lr 1e-3 --data-path a "
        "--max-position-embeddings 3136 --train-iters 100"
    )
    args = parse_args(flags.split(), defaults=defaults())
    notes = validate_args(args, world_size=1)
    assert (args.seq_length, args.max_position_embeddings, args.num_classes) == (197, 197, 1000)
    assert "--seq-length 3136 has no effect: an image makes 197 tokens" in notes


def test_sequence_parallelism_needs_a_sequence_that_divides():
    """With the class token it does not, without it it does."""
    flags = "--tensor-model-parallel-size 2 --sequence-parallel"
    with pytest.raises(ValueError, match=r"--sequence-parallel needs --seq-length 5 divisible by"):
        vision_arguments(flags, world_size=2)
    assert vision_arguments(f"{flags} --disable-vision-class-token", world_size=2).seq_length == 4
