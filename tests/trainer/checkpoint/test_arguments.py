"""The arguments in a checkpoint: what is stored, what must agree, what --use-checkpoint-args takes over."""

import argparse
import pathlib
import pickle

import pytest
import torch

from megatron.core.enums import ModelType
from megatron.core.transformer.enums import AttnBackend
from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.trainer.arguments import parse_args, validate_args
from megatron.trainer.checkpoint import arguments
from megatron.trainer.checkpoint.directory import CheckpointLocation
from megatron.trainer.checkpoint.loader import COMMON_FILE, read_common_state
from tests.trainer.arguments import bert_command_line


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


def test_a_bert_is_no_gpt():
    """Neither weights nor arguments of the one are taken for the other's, and a BERT's binary head has to agree."""
    gpt, bert = model(architecture="gpt"), model(architecture="bert", bert_binary_head=True)
    with pytest.raises(CheckpointError, match=r"DIR holds a BERT, and this program wants a GPT; give it to a program"):
        arguments.check_same_model(gpt, bert, "DIR")
    with pytest.raises(CheckpointError, match="holds a GPT, and this program wants a BERT"):
        arguments.with_saved_arguments(bert, gpt, "DIR")
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
    given = ("num_layers", "tokenizer_model", "lr")
    parsed = model(tokenizer_type=None, tokenizer_model="mine", lr=0.1, hidden_dropout=0.0, given=given)
    saved = model(
        num_layers=8, tensor_model_parallel_size=4, tokenizer_type="NullTokenizer", tokenizer_model="x", lr=1,
        hidden_dropout=0.2,
    )  # fmt: skip
    args = arguments.with_saved_arguments(parsed, saved, "DIR")
    assert (args.num_layers, args.tensor_model_parallel_size, args.lr) == (8, 1, 0.1)
    assert (args.tokenizer_type, args.tokenizer_model, args.hidden_dropout) == ("NullTokenizer", "mine", 0.2)
    assert arguments.with_saved_arguments(parsed, saved, "DIR", further=("lr", "seed")).lr == 1
    assert (parsed.num_layers, parsed.lr) == (4, 0.1)
    with pytest.raises(CheckpointError, match="holds no arguments"):
        arguments.with_saved_arguments(args, None, "DIR")


SHAPE = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512 "
    "--micro-batch-size 4 --train-iters 10 --lr 1e-4 --fp16 --data-path text --vocab-file vocab --merge-file merges"
)


def here(extra: str = "", *, bert: bool = False) -> argparse.Namespace:
    """This project's arguments of a GPT (345M) or a BERT (340M)."""
    words = [*SHAPE.split(), *extra.split()]
    args = parse_args(words, defaults=bert_command_line.defaults() if bert else None)
    validate_args(args, world_size=1)
    args.padded_vocab_size = 50304
    return args


def there(**changes) -> argparse.Namespace:
    """What Megatron-LM stores of a run of that shape with its defaults, after it has completed them.

    Names as of core 0.16: those of the network follow megatron.core's configuration (`layernorm_epsilon`). A GPT stores
    `bert_binary_head`, too; with biases in all linear layers `add_qkv_bias` becomes True.
    """
    values = dict(
        num_layers=24, encoder_num_layers=24, decoder_num_layers=None, hidden_size=1024, ffn_hidden_size=4096,
        num_attention_heads=16, kv_channels=64, group_query_attention=False, num_query_groups=1, seq_length=512,
        encoder_seq_length=512, decoder_seq_length=None, max_position_embeddings=512,
        position_embedding_type="learned_absolute", use_rotary_position_embeddings=False, add_position_embedding=True,
        rotary_base=10000, rotary_percent=1.0, rotary_interleaved=False, rotary_seq_len_interpolation_factor=None,
        use_rope_scaling=False, rope_scaling_factor=8.0, rope_type=None, no_rope_freq=None, mrope_section=None,
        normalization="LayerNorm", layernorm_epsilon=1e-05, layernorm_zero_centered_gamma=False,
        apply_residual_connection_post_layernorm=False, residual_from_norm=False, swiglu=False, squared_relu=False,
        quick_geglu=False, openai_gelu=False, onnx_safe=None, add_bias_linear=True, add_qkv_bias=True,
        qk_layernorm=False, qk_l2_norm=False, softmax_type="vanilla", window_size=None, window_attn_skip_freq=None,
        glu_linear_offset=0.0, activation_func_clamp_value=None,
        attention_output_gate=False, experimental_attention_variant=None, multi_latent_attention=False,
        untie_embeddings_and_output_weights=False, bert_binary_head=True, num_experts=None, mtp_num_layers=None,
        make_vocab_size_divisible_by=128, padded_vocab_size=50304, tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None,
        transformer_impl="transformer_engine", tokenizer_type="GPT2BPETokenizer", vocab_file="vocab",
        merge_file="merges", vocab_size=None, hidden_dropout=0.1, attention_dropout=0.1,
        apply_query_key_layer_scaling=False, params_dtype=torch.float16, attention_backend=AttnBackend.auto,
        model_type=ModelType.encoder_or_decoder, consumed_train_samples=80, consumed_valid_samples=0, iteration=10,
    )  # fmt: skip
    return argparse.Namespace(**{**values, **changes})


@pytest.mark.parametrize("bert", [False, True], ids=["GPT", "BERT"])
@pytest.mark.parametrize("older", [False, True], ids=["0.16", "older"])
def test_default_model_of_megatron_is_the_default_model_here(tmp_path, bert, older):
    """A checkpoint of Megatron-LM's default arguments is of the same model, and its arguments can be read; older ones
    have no `add_qkv_bias`, and other names."""
    saved = there()
    if older:
        del saved.add_qkv_bias, saved.qk_l2_norm, saved.softmax_type, saved.multi_latent_attention
        saved.apply_layernorm_1p = saved.__dict__.pop("layernorm_zero_centered_gamma")
        saved.norm_epsilon = saved.__dict__.pop("layernorm_epsilon")
    torch.save({"args": saved}, tmp_path / COMMON_FILE)
    read = read_common_state(CheckpointLocation(root=tmp_path, path=tmp_path, iteration=10))["args"]
    assert read == saved
    arguments.check_same_model(here(bert=bert), read, "DIR")


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ("--add-qkv-bias", {}),
        ("--disable-bias-linear --add-qkv-bias", {"add_bias_linear": False}),
        ("--disable-bias-linear", {"add_bias_linear": False, "add_qkv_bias": False}),
        ("--group-query-attention --num-query-groups 16", {}),
        ("", {"group_query_attention": True, "num_query_groups": 16}),
        ("", {"num_query_groups": None}),
        ("--apply-layernorm-1p", {"layernorm_zero_centered_gamma": True}),
        ("--position-embedding-type rope", {"position_embedding_type": "rope", "max_position_embeddings": 4096}),
        ("--use-rotary-position-embeddings", {"use_rotary_position_embeddings": True}),
        ("--position-embedding-type rope", {"position_embedding_type": "rope", "rope_scaling_factor": 32.0}),
        ("--no-position-embedding", {"position_embedding_type": "none", "rotary_base": 500000}),
        ("", {"rotary_base": 500000, "rotary_percent": 0.5, "use_rope_scaling": True}),
        ("", {"bert_binary_head": False, "num_experts": 0}),
        ("", {"q_lora_rank": 512, "kv_lora_rank": 512, "rope_type": "rope", "mscale": 2.0, "window_attn_skip_freq": 2}),
        (
            "--multi-latent-attention --rope-type yarn --yarn-beta-fast 32",
            {"multi_latent_attention": True, "yarn_beta_fast": None, "window_size": None},
        ),
        (
            "--window-size 127,0 --window-attn-skip-freq 2",
            {"window_size": (127, 0), "window_attn_skip_freq": [1, 0] * 12},
        ),
    ],
    ids=str,
)
def test_one_model_in_two_spellings(flags, changes):
    """What has no effect in a model, or says the same in other words, is no difference."""
    arguments.check_same_model(here(flags), there(**changes), "DIR")


def test_names_of_megatron_are_taken_over():
    """--use-checkpoint-args knows Megatron-LM's names for arguments that are called otherwise here."""
    saved = there(layernorm_epsilon=1e-6, layernorm_zero_centered_gamma=True)
    args = arguments.with_saved_arguments(argparse.Namespace(**{**vars(here()), "given": ()}), saved, "DIR")
    assert (args.norm_epsilon, args.apply_layernorm_1p) == (1e-6, True)
    saved = there(num_experts=4, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01)
    args = arguments.with_saved_arguments(argparse.Namespace(**{**vars(here()), "given": ()}), saved, "DIR")
    assert (args.moe_router_load_balancing_type, args.moe_aux_loss_coeff) == (["aux_loss"], [0.01])
    with pytest.raises(CheckpointError, match="moe_latent_size is 8 there"):
        arguments.with_saved_arguments(args, there(moe_latent_size=8), "DIR")
