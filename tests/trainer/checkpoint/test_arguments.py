"""The arguments in a checkpoint: what is stored, what must agree, what --use-checkpoint-args takes over."""

import argparse
import pathlib
import pickle

import pytest
import torch

from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.trainer.checkpoint import arguments


def model(**changes):
    values = dict(
        num_layers=4, hidden_size=64, num_attention_heads=4, position_embedding_type="learned_absolute",
        max_position_embeddings=128, rotary_base=10000, group_query_attention=False, num_query_groups=1,
        padded_vocab_size=512, make_vocab_size_divisible_by=128, tensor_model_parallel_size=1,
    )  # fmt: skip
    return argparse.Namespace(**{**values, **changes})


def test_stored_arguments_are_plain_values():
    """Any program can unpickle them: functions and objects are left out, paths become text."""
    args = model(data=[1, (2, "x")], dtype=torch.bfloat16, path=pathlib.Path("/a/b"), provider=print, odd=[object()])
    saved = arguments.saved_arguments(args, iteration=7)
    assert pickle.loads(pickle.dumps(saved)) == saved
    assert (saved.data, saved.dtype, saved.path, saved.iteration) == ([1, (2, "x")], torch.bfloat16, "/a/b", 7)
    assert not hasattr(saved, "provider") and not hasattr(saved, "odd")


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_layers", 8), ("hidden_size", 32), ("num_attention_heads", 2), ("max_position_embeddings", 64)],
)
def test_first_mismatching_argument_is_named(name, value):
    """The error names the argument, both values, and the remedy."""
    with pytest.raises(CheckpointError, match=rf"{name} is {value} there and .* here.*--use-checkpoint-args"):
        arguments.check_same_model(model(), model(**{name: value}), "DIR")


def test_a_bert_is_no_gpt():
    """Neither weights nor arguments of the one are taken for the other's, and a BERT's binary head has to agree."""
    gpt, bert = model(architecture="gpt"), model(architecture="bert", bert_binary_head=True)
    with pytest.raises(CheckpointError, match=r"DIR holds a BERT, and this program wants a GPT; give it to a program"):
        arguments.check_same_model(gpt, bert, "DIR")
    with pytest.raises(CheckpointError, match="holds a GPT, and this program wants a BERT"):
        arguments.apply_saved_arguments(bert, gpt, "DIR")
    with pytest.raises(CheckpointError, match="bert_binary_head is True there and False here"):
        arguments.check_same_model(model(architecture="bert", bert_binary_head=False), bert, "DIR")
    arguments.check_same_model(bert, model(), "DIR")  # Megatron-LM's checkpoints do not say


def test_what_does_not_matter_may_differ():
    """Degrees of parallelism, unknown arguments, and arguments without effect in this model are not compared."""
    arguments.check_same_model(model(), model(rotary_base=5, num_query_groups=2, tensor_model_parallel_size=2), "DIR")
    arguments.check_same_model(model(), argparse.Namespace(num_layers=None), "DIR")
    arguments.check_same_model(model(), None, "DIR")


def test_another_order_of_samples_is_said():
    """What decides the order, from what to what; how it is spelled, what else differs, or nothing to train, no word."""
    there = model(seed=1, seq_length=32, split="969, 30, 1", data_path=["a"], train_iters=10, global_batch_size=4)
    (line,) = arguments.what_changes(
        model(**{**vars(there), "seed": 7, "seq_length": 64, "data_path": ["a", "b"]}), there
    )
    assert line.startswith(
        "was saved with --seq-length 32 (now 64), --seed 1 (now 7), --data-path a (now a b): the samples, or their ord"
    )
    assert not arguments.what_changes(model(**{**vars(there), "split": "969,30,1", "lr": 3}), there)
    assert not arguments.what_changes(model(**{**vars(there), "seed": 7, "skip_train": True}), there)
    assert not arguments.what_changes(model(**{**vars(there), "train_iters": 5, "global_batch_size": 8}), there)
    (line,) = arguments.what_changes(model(**{**vars(there), "train_iters": 20}), there)
    assert line.startswith("was saved by a run of 40 samples, and this run has 80: data that a run passes through se")


def test_padding_of_the_vocabulary_may_differ_but_not_the_vocabulary():
    """Padded sizes agree if one vocabulary can be padded to both at the two tensor-parallel degrees."""
    arguments.check_same_model(model(), model(padded_vocab_size=1024, tensor_model_parallel_size=8), "DIR")
    with pytest.raises(CheckpointError, match="padded_vocab_size is 1024 there and 512 here"):
        arguments.check_same_model(model(), model(padded_vocab_size=1024), "DIR")


def test_use_checkpoint_args_takes_the_model_but_not_the_run():
    """What decides the shape comes from the checkpoint; degrees, the run, and a tokenizer named by the user stay."""
    args = model(tokenizer_type=None, tokenizer_model="mine", lr=0.1, hidden_dropout=0.0)
    args.given = ("num_layers", "tokenizer_model", "lr")
    saved = model(
        num_layers=8, tensor_model_parallel_size=4, tokenizer_type="NullTokenizer", tokenizer_model="x", lr=1,
        hidden_dropout=0.2,
    )  # fmt: skip
    arguments.apply_saved_arguments(args, saved, "DIR")
    assert (args.num_layers, args.tensor_model_parallel_size, args.lr) == (8, 1, 0.1)
    assert (args.tokenizer_type, args.tokenizer_model, args.hidden_dropout) == ("NullTokenizer", "mine", 0.2)
    with pytest.raises(CheckpointError, match="holds no arguments"):
        arguments.apply_saved_arguments(args, None, "DIR")
