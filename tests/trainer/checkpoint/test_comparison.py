"""Models are compared, not the spelling of their arguments: what Megatron-LM stores of its own default models loads."""

import argparse

import pytest
import torch

from megatron import backend

backend.install()

from megatron.core.enums import ModelType
from megatron.core.transformer.enums import AttnBackend
from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.trainer.arguments import parse_args, validate_args
from megatron.trainer.checkpoint import arguments
from megatron.trainer.checkpoint.directory import CheckpointLocation
from megatron.trainer.checkpoint.loader import COMMON_FILE, read_common_state
from tests.trainer.arguments import bert_command_line

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
        apply_residual_connection_post_layernorm=False, swiglu=False, squared_relu=False, quick_geglu=False,
        openai_gelu=False, onnx_safe=None, add_bias_linear=True, add_qkv_bias=True, qk_layernorm=False,
        qk_l2_norm=False, softmax_type="vanilla", window_size=None, window_attn_skip_freq=None,
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
    ],
    ids=str,
)
def test_one_model_in_two_spellings(flags, changes):
    """What has no effect in a model, or says the same in other words, is no difference."""
    arguments.check_same_model(here(flags), there(**changes), "DIR")


@pytest.mark.parametrize(
    ("flags", "changes", "said"),
    [
        ("", {"add_bias_linear": False, "add_qkv_bias": False}, "add_bias_linear is False there and True here"),
        ("--disable-bias-linear", {"add_bias_linear": False}, "add_qkv_bias is True there and False here"),
        ("", {"group_query_attention": True, "num_query_groups": 4}, "num_query_groups is 4 there and 16 here"),
        ("", {"layernorm_zero_centered_gamma": True}, "apply_layernorm_1p is True there and False here"),
        ("", {"position_embedding_type": "rope"}, "position_embedding_type is 'rope' there"),
        ("--position-embedding-type rope", {"position_embedding_type": "rope", "rotary_base": 5}, "rotary_base is 5"),
        (
            "--position-embedding-type rope",
            {"position_embedding_type": "rope", "rotary_seq_len_interpolation_factor": 4},
            "rotary_seq_len_interpolation_factor is 4 there and 1 here",
        ),
        ("", {"num_experts": 8}, "is not built here: num_experts is 8 there; train it with Megatron-LM"),
        ("", {"softmax_type": "learnable"}, "softmax_type is 'learnable' there"),
        ("", {"position_embedding_type": "relative"}, "position_embedding_type is 'relative' there; train it with"),
    ],
    ids=str,
)
def test_another_model_is_named(flags, changes, said):
    """A real difference is refused by name, also one that only the defaults of one side hold."""
    with pytest.raises(CheckpointError, match=said):
        arguments.check_same_model(here(flags), there(**changes), "DIR")


def test_names_of_megatron_are_taken_over():
    """--use-checkpoint-args knows Megatron-LM's names for arguments that are called otherwise here."""
    args = here()
    args.given = ()
    arguments.apply_saved_arguments(args, there(layernorm_epsilon=1e-6, layernorm_zero_centered_gamma=True), "DIR")
    assert (args.norm_epsilon, args.apply_layernorm_1p) == (1e-6, True)
    with pytest.raises(CheckpointError, match="num_experts is 8 there"):
        arguments.apply_saved_arguments(args, there(num_experts=8), "DIR")
