"""pretrain_vision_classify.py from flags to losses: one result however the job is cut, and what it refuses."""

import pytest
import torch

from megatron.trainer.arguments import parse_args, validate_args
from tests.trainer.arguments.command_line import argv
from tests.trainer.run.vision_helper import defaults, numbers, train_vision, vision_arguments


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


@pytest.mark.full
def test_epochs_are_the_length_of_a_run():
    """20 samples in batches of 8, three times: 8 batches, with an evaluation behind each epoch, on the third batch."""
    epochs = train_vision(1, "--epochs 3 --lr-decay-style linear")
    assert epochs[0]["iteration"] == 8
    assert numbers(epochs) == numbers(train_vision(1, "--train-iters 8 --lr-decay-style linear"))


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


@pytest.mark.parametrize(
    "flag, program",
    [
        ("--img-h 8", r"pretrain_vision_classify\.py.*"),
        ("--num-classes 3", r"pretrain_vision_classify\.py.*"),
        ("--epochs 2", r"pretrain_vision_classify\.py.*"),
        ("--disable-vision-class-token", r"pretrain_vision_classify\.py.*"),
        ("--mask-prob 0.1", r"pretrain_bert\.py"),
        ("--short-seq-prob 0.1", r"pretrain_bert\.py"),
        ("--bert-no-binary-head", r"pretrain_bert\.py"),
    ],
)
def test_flags_of_other_programs_belong_to_them(flag, program):
    """pretrain_gpt.py refuses them."""
    with pytest.raises(ValueError, match=rf"{flag.split()[0]} belongs to {program}; leave it out"):
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
