"""pretrain_bert.py from flags to losses: one result however the job is cut, and the flags that belong to BERT."""

import functools
import math

import pytest
import torch

from megatron import backend

backend.install()

from megatron.trainer.arguments import parse_args, validate_args
from tests.trainer.arguments.bert_command_line import SMALL_BERT, bert_arguments, data_flags
from tests.trainer.arguments.command_line import argv
from tests.trainer.run.run_case import train

BASE = (
    f"{SMALL_BERT} --num-workers 0 --log-interval 1 --eval-iters 1 --eval-interval 3 --hidden-size 32 "
    "--train-iters 6 --lr-decay-style constant --lr 1e-2 --clip-grad 0 --untie-embeddings-and-output-weights"
)


def train_bert(num_ranks: int, flags: str = "", **options) -> list[dict]:
    return train(num_ranks, f"{data_flags()} {flags}", program="pretrain_bert", base=BASE, **options)


def numbers(results: list[dict], *names: str) -> list[tuple]:
    """The metrics of these names that the last rank recorded, in order."""
    names = names or ("lm_loss", "sop_loss", "validation_loss", "validation_sop_loss", "test_loss")
    return [(record["iteration"], *(record.get(name) for name in names)) for record in results[-1]["records"]]


@functools.cache
def bert_alone(schedule: str = "flush") -> list[dict]:
    """A single process, with dropout, under a schedule without delay or with one."""
    return train_bert(1, f"--pipeline-schedule {schedule}")


@pytest.mark.parametrize(
    "stages, schedule",
    [
        pytest.param(4, "2bw", marks=pytest.mark.full),  # test_a_resumed_run_goes_on has it, too
        (4, "bpipe"),
        (2, "interleaved --num-virtual-stages-per-pipeline-rank 2"),
        pytest.param(2, "flush", marks=pytest.mark.full),
        pytest.param(4, "flush", marks=pytest.mark.full),
        pytest.param(2, "2bw", marks=pytest.mark.full),
        pytest.param(2, "gpipe", marks=pytest.mark.full),
        pytest.param(4, "gpipe", marks=pytest.mark.full),
    ],
)
def test_the_pipeline_changes_nothing(stages, schedule):
    """Training and validation losses of p stages, from files and with dropout, are bit-equal to a single process's."""
    reference = bert_alone("2bw" if schedule == "2bw" else "flush")
    found = train_bert(stages, f"--pipeline-schedule {schedule}")
    assert numbers(found) == numbers(reference)
    assert sum(record[3] is not None for record in numbers(found)) == 2
    assert all(math.isfinite(record[1] + record[2]) for record in numbers(found, "lm_loss", "sop_loss") if record[1])
    assert reference[0]["losses"][6] < reference[0]["losses"][1]


def test_replicas_weigh_microbatches_as_one_process_does():
    """Two replicas report the losses of a single process: every microbatch counts alike, whichever replica has it."""
    found = train_bert(2, "--pipeline-model-parallel-size 1")[-1]["losses"]
    expected = bert_alone()[0]["losses"]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("flags", ["--pipeline-schedule 2bw", pytest.param("", marks=pytest.mark.full)])
def test_a_resumed_run_goes_on(tmp_path, flags):
    """Saved after three iterations and started anew, losses, validation and weights are those of the whole run."""
    whole = train_bert(2, f"{flags} --save {tmp_path} --save-interval 3")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = train_bert(2, f"{flags} --load {tmp_path}")
    assert numbers(resumed) == [record for record in numbers(whole) if record[0] > 3]
    for ours, theirs in zip(resumed, whole, strict=True):
        assert all(torch.equal(tensor, ours["weights"][name]) for name, tensor in theirs["weights"].items())


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        "--bert-no-binary-head --pipeline-schedule 2bw",
        "--bf16 --pipeline-schedule 2bw",
        "--fp16 --initial-loss-scale 1024 --lr 1e-3",
        "--pipeline-recompute --pipeline-schedule 2bw",
        "--position-embedding-type rope --swiglu --disable-bias-linear",
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-schedule 2bw",
        "--num-workers 1 --micro-batch-size 2 --clip-grad 1.0",
        "--decoder-first-pipeline-num-layers 1 --pipeline-schedule 2bw",
    ],
)
def test_feature_trains_on_two_stages(flags):
    """p=2: every loss is finite, and the last lies below the first."""
    ranks = 4 if "tensor" in flags else 2
    losses = train_bert(ranks, f"--pipeline-model-parallel-size 2 {flags}")[-1]["losses"]
    assert len(losses) == 6 and all(map(math.isfinite, losses.values()))
    assert losses[6] < losses[1]


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--mock-data", "--mock-data: megatron.core has no synthetic samples of BERT; give --data-path"),
        ("--reset-attention-mask", "--reset-attention-mask: a sample of BERT ends with its document"),
        ("--no-create-attention-mask-in-dataloader", "--no-create-attention-mask-in-dataloader: BERT needs the masks"),
        ("--normalization RMSNorm", "--normalization RMSNorm: the head of megatron.core's BERT"),
        ("--rotary-base 5", "--rotary-base 5: megatron.core's BERT"),
        ("--seq-length 4", "--seq-length 4 has no room for"),
        ("--seed 4294967295", "--seed 4294967295 is beyond what BERT's sample index takes"),
        ("--mask-prob 1", "--mask-prob 1.0 must be greater than 0 and less than 1"),
        ("--short-seq-prob 2", "--short-seq-prob 2.0 must be at least 0 and at most 1"),
    ],
)
def test_what_bert_does_not_have_is_refused(flags, message):
    """Flags of a GPT's data and layers are refused by name, with the reason."""
    with pytest.raises(ValueError) as caught:
        bert_arguments(flags)
    assert message in str(caught.value)


@pytest.mark.parametrize("flag", ["--mask-prob 0.1", "--short-seq-prob 0.1", "--bert-no-binary-head"])
def test_flags_of_bert_belong_to_bert(flag):
    """pretrain_gpt.py refuses them."""
    with pytest.raises(ValueError, match=f"{flag.split()[0]} belongs to pretrain_bert.py; leave it out"):
        validate_args(parse_args(argv(flag)), world_size=1)


def test_defaults_are_not_given():
    """The tokenizer that the program prefers is a default, which a checkpoint's may replace."""
    args = bert_arguments()
    assert args.tokenizer_type == "BertWordPieceLowerCase" and "tokenizer_type" not in args.given
    assert args.architecture == "bert" and parse_args(argv()).architecture == "gpt"
