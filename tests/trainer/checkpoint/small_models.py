"""Small random models of transformers, saved as their users save them, and what transformers computes with them."""

import functools
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from tests.trainer.arguments.t5_command_line import write_tokenizer

VOCABULARY, POSITIONS, NUM_LAYERS = 100, 32, 2
TARGET = 12  # tokens of a decoder
_LLAMA = dict(
    hidden_size=32, num_hidden_layers=NUM_LAYERS, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
    vocab_size=VOCABULARY, max_position_embeddings=POSITIONS, rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=None,
    tie_word_embeddings=False,
)  # fmt: skip
_LLAMA_31 = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
             "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 20_000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
         "original_max_position_embeddings": 64}  # fmt: skip
_GPT_OSS = _LLAMA | dict(
    head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=5, swiglu_limit=0.8,
    rope_parameters=_YARN | dict(truncate=False), intermediate_size=64, hidden_size=64,
)  # fmt: skip
_DEEPSEEK = _LLAMA | dict(
    num_hidden_layers=4, num_key_value_heads=4, n_routed_experts=8, moe_intermediate_size=16, n_shared_experts=1,
    kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16, first_k_dense_replace=1, rms_norm_eps=1e-6,
    norm_topk_prob=False,
)  # fmt: skip
_BERT = dict(
    hidden_size=32, num_hidden_layers=NUM_LAYERS, num_attention_heads=4, intermediate_size=48, vocab_size=VOCABULARY,
    max_position_embeddings=POSITIONS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, layer_norm_eps=1e-5,
    pad_token_id=None,
)  # fmt: skip
_T5 = dict(
    d_model=32, d_kv=16, d_ff=48, num_layers=NUM_LAYERS, num_decoder_layers=NUM_LAYERS, num_heads=4, dropout_rate=0.0,
    relative_attention_num_buckets=8, relative_attention_max_distance=12, feed_forward_proj="gated-gelu",
    vocab_size=VOCABULARY, tie_word_embeddings=False, decoder_start_token_id=0,
)  # fmt: skip
MODELS = {
    "llama": ("Llama", _LLAMA | dict(rope_parameters={"rope_type": "default", "rope_theta": 20_000.0})),
    "llama 3.1": ("Llama", _LLAMA | dict(rope_parameters=_LLAMA_31, num_key_value_heads=4)),
    "llama of four": ("Llama", _LLAMA | dict(num_hidden_layers=4)),
    "qwen2": ("Qwen2", _LLAMA | dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", _LLAMA | dict(head_dim=16)),
    "mixtral": ("Mixtral", _LLAMA | dict(num_local_experts=4)),
    "mistral": ("Mistral", _LLAMA | dict(head_dim=16, sliding_window=None)),
    "qwen3_moe": ("Qwen3Moe", _LLAMA | dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                                            norm_topk_prob=True)),
    "qwen3_moe, unnormalized": ("Qwen3Moe", _LLAMA | dict(head_dim=16, num_experts=4, num_experts_per_tok=2,
                                                          moe_intermediate_size=16, norm_topk_prob=False)),
    "gpt_oss": ("GptOss", _GPT_OSS),
    "deepseek_v3": ("DeepseekV3", _DEEPSEEK | dict(
        q_lora_rank=16, n_group=4, topk_group=2, num_experts_per_tok=4, routed_scaling_factor=2.5,
        norm_topk_prob=True, rope_parameters=_YARN | dict(mscale=0.7, mscale_all_dim=0.9), num_mtp_layers=0)),
    "deepseek_v2": ("DeepseekV2", _DEEPSEEK | dict(
        q_lora_rank=None, num_experts_per_tok=3, topk_method="greedy", n_shared_experts=2,
        rope_parameters={"rope_type": "default", "rope_theta": 20_000.0})),
    "deepseek_v2, groups": ("DeepseekV2", _DEEPSEEK | dict(
        q_lora_rank=16, num_experts_per_tok=2, topk_method="group_limited_greedy", n_group=4, topk_group=2,
        rope_parameters=_YARN, first_k_dense_replace=0)),
    "bert": ("Bert", _BERT),
    "megatron-bert": ("MegatronBert", _BERT),
    "t5": ("T5", _T5),
    "mt5": ("MT5", _T5 | dict(num_decoder_layers=3)),
    "t5, the first": ("T5", _T5 | dict(feed_forward_proj="relu", tie_word_embeddings=True)),
    "mistral, window": ("Mistral", _LLAMA | dict(head_dim=16, sliding_window=5)),
    "qwen3, yarn and windows": ("Qwen3", _LLAMA | dict(
        head_dim=16, use_sliding_window=True, sliding_window=4, max_window_layers=1, rope_parameters=_YARN)),
    "gpt2": ("GPT2", dict(n_embd=32, n_layer=NUM_LAYERS, n_head=4, vocab_size=VOCABULARY, n_positions=POSITIONS,
                          resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0, bos_token_id=None, eos_token_id=None)),
    "gpt2, exact GELU": ("GPT2", dict(n_embd=32, n_layer=NUM_LAYERS, n_head=4, vocab_size=VOCABULARY, n_inner=48,
                                      n_positions=POSITIONS, activation_function="gelu", bos_token_id=None,
                                      eos_token_id=None)),
}  # fmt: skip
"""Name -> transformers' name of the architecture, and its configuration."""


def tokens() -> torch.Tensor:
    return torch.arange(2 * 16).view(2, 16) * 37 % VOCABULARY


def model_class(kind: str) -> type:
    """transformers' class of a model with its head."""
    import transformers

    heads = {"GPT2": "LMHeadModel", "Bert": "ForPreTraining", "MegatronBert": "ForPreTraining"}
    heads |= dict.fromkeys(("T5", "MT5"), "ForConditionalGeneration")
    return getattr(transformers, kind + heads.get(kind, "ForCausalLM"))


@functools.cache
def saved(name: str, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> Path:
    """The folder of a model. Norms and biases are random, too, so that no mistake hides behind a 1."""
    import transformers

    kind, options = MODELS[name]
    torch.manual_seed(7)
    model = model_class(kind)(getattr(transformers, kind + "Config")(**options))
    with torch.no_grad():
        spread = 0.05 if kind in ("T5", "MT5") else 0.15  # scores of a T5 are not scaled
        for key, parameter in model.named_parameters():
            mean = 1.0 if "norm" in key or "ln_" in key else 0.0
            parameter.copy_(mean * key.endswith("weight") + spread * torch.randn(parameter.shape))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.15 * torch.randn(buffer.shape))
    folder = Path(tempfile.mkdtemp(prefix="hugging_face_"))
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    if kind in ("T5", "MT5") and not options["tie_word_embeddings"]:
        _give_head(folder)
    return folder


def _give_head(folder: Path) -> None:
    """Add a head of its own, as published T5s have, to one that transformers has tied."""
    from safetensors.torch import save_file

    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    config.pop("scale_decoder_outputs", None)
    (folder / "config.json").write_text(json.dumps(config))
    tensors, index = stored(folder), folder / "model.safetensors.index.json"
    name, head = "lm_head.weight", 0.15 * torch.randn_like(tensors["shared.weight"])
    if not index.exists():
        save_file(tensors | {name: head}, folder / "model.safetensors", metadata={"format": "pt"})
        return
    places = json.loads(index.read_text())
    places["weight_map"][name] = "head.safetensors"
    index.write_text(json.dumps(places))
    save_file({name: head}, folder / "head.safetensors", metadata={"format": "pt"})


def convert_case(
    source: Path, output: Path, to: str = "torch_dist", own_norms: bool = False, further: tuple[str, ...] = ()
) -> None:
    """Convert a model in this process. `own_norms`: under the keys of Transformer Engine's layers with experts.
    `further`: words of the command line."""
    from unittest import mock

    from megatron.commands import convert_checkpoint
    from megatron.trainer.checkpoint import conversion

    write = conversion.write_checkpoint

    def spelled(root, weights, tensors, **options):
        renamed = [
            replace(each, key=each.key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")) for each in tensors
        ]
        assert renamed != tensors
        return write(root, weights, renamed, **options)

    with mock.patch.object(conversion, "write_checkpoint", spelled if own_norms else write):
        assert convert_checkpoint.main([str(source), str(output), "--to", to, *further]) == 0


def architecture_of(folder: Path) -> str:
    """Of the program that trains the model."""
    from megatron.trainer.arguments.model_families import FAMILIES

    return FAMILIES[json.loads((folder / "config.json").read_text())["model_type"]].architecture


def transformers_logits(folder: Path) -> torch.Tensor:
    """(batch, sequence, vocabulary) in FP32; of a BERT with one row more for the order of the segments."""
    import transformers

    kind = {
        "gpt": transformers.AutoModelForCausalLM, "bert": transformers.AutoModelForPreTraining,
        "t5": transformers.AutoModelForSeq2SeqLM,
    }[architecture_of(folder)]  # fmt: skip
    return logits_of(kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager"))


def logits_of(model) -> torch.Tensor:
    """As `transformers_logits`, of a model of transformers."""
    with torch.no_grad():
        if model.config.model_type in ("t5", "mt5"):
            return model.eval()(tokens(), decoder_input_ids=tokens()[:, :TARGET]).logits
        if model.config.model_type not in ("bert", "megatron-bert"):
            return model.eval()(tokens()).logits
        output = model.eval()(tokens(), token_type_ids=tokens() % 2)
        return with_order(output.prediction_logits, output.seq_relationship_logits)


def with_order(logits: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Logits of tokens [b, s, v] and of orders [b, 2] in one tensor."""
    return torch.cat((logits, torch.nn.functional.pad(order, (0, logits.shape[2] - 2)).unsqueeze(1)), dim=1)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, by the package safetensors."""
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def loaded(flags: str, architecture: str = "gpt") -> tuple:
    """The configuration, and this rank's chunks with the weights of `--load-hf` or `--load`, if given. Collective."""
    import torch.distributed as dist

    from megatron.core import parallel_state
    from megatron.trainer.checkpoint.checkpoint import CheckpointPosition, RunParts, load_checkpoint, save_checkpoint
    from megatron.trainer.checkpoint.hugging_face import load_hugging_face
    from megatron.trainer.checkpoint.writer import CheckpointWriter
    from megatron.trainer.data.tokenizer import build_tokenizer, padded_vocab_size
    from megatron.trainer.models import core_config
    from megatron.trainer.models.bert import bert_model
    from megatron.trainer.models.gpt import build_chunks, gpt_model
    from megatron.trainer.models.t5 import t5_model
    from megatron.trainer.plan import from_flags
    from megatron.trainer.start_up.initialize import initialize
    from tests.trainer.arguments.command_line import configuration

    words = f"--micro-batch-size 2 --train-iters 1 --lr 1e-3 {flags}".split()
    own, model = {
        "gpt": ("--seq-length 16 --mock-data", gpt_model),
        "bert": ("--seq-length 16 --data-path none", bert_model),
        "t5": (f"--encoder-seq-length 16 --decoder-seq-length {TARGET} --data-path none", t5_model),
    }[architecture]
    defaults = {"architecture": architecture}
    if architecture == "t5":
        words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", f"{_tokenizer()}"]
    args = initialize(configuration([*words, *own.split()], world_size=dist.get_world_size(), defaults=defaults))
    args = replace(args, padded_vocab_size=padded_vocab_size(args, build_tokenizer(args)))
    config = core_config.transformer_config(args)
    chunks = build_chunks(
        lambda own: lambda pre, post: model(args, own, pre_process=pre, post_process=post),
        config, stages=args.schedule.stages_of(parallel_state.get_pipeline_model_parallel_rank()),
        layers=from_flags.layers_of_stages(config),
    )  # fmt: skip
    if args.load_hf is not None:
        load_hugging_face(RunParts(chunks), args=args)
    elif args.load is not None:
        load_checkpoint(RunParts(chunks), args=args)
    if args.save is not None:
        save_checkpoint(
            CheckpointWriter(args.save), RunParts(chunks), args=args, position=CheckpointPosition(iteration=3)
        )
    return args, chunks


@functools.cache
def _tokenizer() -> Path:
    return write_tokenizer(Path(tempfile.mkdtemp(prefix="tokenizer_")))


def logits_case(flags: str, architecture: str = "gpt") -> torch.Tensor | None:
    """Load as `pretrain_gpt.py` does, and compute through the pipeline; the last stage returns the logits."""
    import torch.distributed as dist

    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model
    from megatron.trainer.arguments.flags.config import edge_length

    args, chunks = loaded(flags, architecture)
    stage, stages = parallel_state.get_pipeline_model_parallel_rank(), args.pipeline_model_parallel_size
    ids = tokens()
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    mask = torch.ones(1, 1, ids.shape[1], ids.shape[1]).triu(1).bool()
    model = unwrap_model(chunks[0]).eval()
    group = parallel_state.get_pipeline_model_parallel_group()
    neighbours = dist.get_process_group_ranks(group)
    with torch.no_grad():
        if stage:
            length = edge_length(args) // (args.tensor_model_parallel_size if args.sequence_parallel else 1)
            entered = torch.empty(length, ids.shape[0], args.hidden_size)
            dist.recv(entered, neighbours[stage - 1])
            model.set_input_tensor(entered)
        if architecture == "t5":
            target = ids[:, :TARGET]
            output = model(ids, target, torch.ones_like(ids), torch.ones_like(target))
        elif architecture == "bert":
            output = model(ids, torch.ones_like(ids), tokentype_ids=ids % 2)
            order = output[1] if stage == stages - 1 else None
            output = output[0] if stage == stages - 1 else output
        else:
            output = model(ids, positions, mask)
        if stage < stages - 1:
            dist.send(output.contiguous(), neighbours[stage + 1])
            output = None
        else:
            parts = [torch.empty_like(output) for _ in range(args.tensor_model_parallel_size)]
            dist.all_gather(parts, output.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
            output = torch.cat(parts, dim=-1)
            output = with_order(output, order) if architecture == "bert" else output
    parallel_state.destroy_model_parallel()
    return output


def reaches(folder: Path, flags: str, expected: torch.Tensor, ranks: int = 1) -> float:
    """The largest difference of the logits from transformers', over the largest logit."""
    from tests import workers

    options = {"flags": flags, "architecture": architecture_of(folder)}
    found = workers.run(ranks, "tests.trainer.checkpoint.small_models:logits_case", **options)[-1]
    return ((found[..., :VOCABULARY] - expected).abs().max() / expected.abs().max()).item()
