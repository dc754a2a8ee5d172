"""pretrain_bert.py from flags to losses: one result however the job is cut, and the flags that belong to BERT."""

import functools

import pytest

from megatron.trainer.arguments import parse_args
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


def test_defaults_are_not_given():
    """The tokenizer that the program prefers is a default, which a checkpoint's may replace."""
    args = bert_arguments()
    assert args.tokenizer_type == "BertWordPieceLowerCase" and "tokenizer_type" not in args.given
    assert args.architecture == "bert" and parse_args(argv()).architecture == "gpt"
