"""megatron.core's models of latents, windows, sinks, clamped gates and YaRN compute what their papers say.

The oracle is plain torch, from the formulas: latents and their rotated part from DeepSeek-V2 (arXiv 2405.04434,
section 2.1), YaRN from Peng et al. (arXiv 2309.00071, sections 3.2 to 3.4), sinks and the clamped gate from GPT-OSS's
model card (arXiv 2508.10925, section 2) and megatron.core's configuration.
"""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests import workers
from tests.trainer.arguments.command_line import arguments

VOCABULARY, LENGTH = 128, 24
COMMON = (
    f"--num-layers 2 --seq-length {LENGTH} --normalization RMSNorm --hidden-dropout 0 --attention-dropout 0 "
    "--untie-embeddings-and-output-weights --norm-epsilon 1e-6 --init-method-std 0.2"
)
LATENT = (
    "--multi-latent-attention --kv-lora-rank 24 --qk-head-dim 12 --qk-pos-emb-head-dim 16 --v-head-dim 10 "
    "--position-embedding-type rope --swiglu --disable-bias-linear"
)
YARN = "--rotary-scaling-factor 40 --yarn-original-max-position-embeddings 16"
MODELS = {
    "latents of queries, YaRN": f"{LATENT} --q-lora-rank 20 --qk-layernorm {YARN} --mscale 1.2 --mscale-all-dim 0.7",
    "direct queries, rope": f"{LATENT} --rope-type rope --rotary-base 500",
    "GPT-OSS": "--softmax-type learnable --window-size 5,0 --window-attn-skip-freq 2 --quick-geglu "
    "--glu-linear-offset 1 --activation-func-clamp-value 0.5 --group-query-attention --num-query-groups 2 "
    f"--position-embedding-type yarn {YARN} --yarn-beta-fast 4 --no-yarn-correction-range-round-to-int",
    "off by one, windows of some layers": "--softmax-type off-by-one --window-size 3,0 --swiglu "
    "--window-attn-skip-freq [0,1] --position-embedding-type rope --activation-func-clamp-value 0.3 "
    "--disable-bias-linear",
}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def temperature(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def rotated(x: Tensor, args, *, yarn: bool) -> Tensor:
    """Turn channel i and i + half of [s, b, heads, channels] by an angle that grows with the position."""
    half = x.shape[-1] // 2
    speeds = [args.rotary_base ** (-i / half) for i in range(half)]
    factor = 1.0
    if yarn:
        length, factor = args.yarn_original_max_position_embeddings, args.rotary_scaling_factor
        ends = [
            half * math.log(length / (2 * math.pi * turns)) / math.log(args.rotary_base)
            for turns in (args.yarn_beta_fast, args.yarn_beta_slow)
        ]
        if args.yarn_correction_range_round_to_int:
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        low, high = max(ends[0], 0), min(ends[1], 2 * half - 1)
        slowed = [min(max((i - low) / (high - low), 0), 1) for i in range(half)]
        speeds = [speed * (1 - part) + speed / factor * part for speed, part in zip(speeds, slowed, strict=True)]
        factor = temperature(factor, args.mscale) / temperature(factor, args.mscale_all_dim)
    angles = torch.arange(x.shape[0])[:, None] * torch.tensor(speeds)
    cosine, sine = (factor * each[:, None, None, :] for each in (angles.cos(), angles.sin()))
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def attended(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, sinks: Tensor | None) -> Tensor:
    """Causal attention of [s, b, heads, channels], token by token: [s, b, heads x channels]."""
    results = []
    for place in range(q.shape[0]):
        first = 0 if window is None else max(0, place - window)
        scores = torch.einsum("bhd,sbhd->bhs", q[place], k[first : place + 1]) * scale
        weights = scores.exp()
        total = weights.sum(-1) + (0 if sinks is None else sinks.exp())
        results.append(torch.einsum("bhs,sbhd->bhd", weights / total[..., None], v[first : place + 1]))
    return torch.stack(results).flatten(2)


def oracle(args, w: dict[str, Tensor], tokens: Tensor, window: int | None) -> Tensor:
    """The summed loss of predicting each token itself. `window`: the tokens before itself that one attends to."""
    heads, yarn = args.num_attention_heads, "yarn" in (args.position_embedding_type, args.rope_type)
    x = w["embedding.word_embeddings.weight"][tokens].transpose(0, 1)
    for layer in range(args.num_layers):

        def of(name, layer=layer):
            return w.get(f"decoder.layers.{layer}.{name}")

        def linear(y, name, of=of):
            return functional.linear(y, of(f"{name}.weight"), of(f"{name}.bias"))

        y = norm(x, of("input_layernorm.weight"))
        if args.multi_latent_attention:
            q, k, v, scale = latent_heads(args, y, of, linear, yarn=yarn)
        else:
            q, k, v = grouped_heads(args, linear(y, "self_attention.linear_qkv"), yarn=yarn)
            scale = args.kv_channels**-0.5
        pattern = args.window_attn_skip_freq
        has_window = pattern is None or (pattern[layer] if isinstance(pattern, list) else (layer + 1) % pattern)
        sinks = {"vanilla": None, "off-by-one": torch.zeros(heads)}.get(args.softmax_type)
        sinks = of("self_attention.core_attention.softmax_offset") if args.softmax_type == "learnable" else sinks
        y = attended(q, k, v, scale=scale, window=window if has_window else None, sinks=sinks)
        x = x + linear(y, "self_attention.linear_proj")
        gate, straight = linear(norm(x, of("pre_mlp_layernorm.weight")), "mlp.linear_fc1").chunk(2, -1)
        if args.activation_func_clamp_value is not None:
            limit = args.activation_func_clamp_value
            gate, straight = gate.clamp(max=limit), straight.clamp(-limit, limit)
        gate = gate * torch.sigmoid((1.702 if args.quick_geglu else 1.0) * gate)
        x = x + linear(gate * (straight + args.glu_linear_offset), "mlp.linear_fc2")
    logits = norm(x, w["decoder.final_layernorm.weight"]) @ w["output_layer.weight"].T
    return functional.cross_entropy(logits.flatten(0, 1), tokens.T.flatten(), reduction="sum")


def grouped_heads(args, projected: Tensor, *, yarn: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of heads: a group's queries, its key and its value stand beside one another."""
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    of_group = args.num_attention_heads // groups
    by_group = projected.unflatten(-1, (groups, of_group + 2, args.kv_channels))
    q, k, v = by_group[..., :-2, :].flatten(2, 3), by_group[..., -2, :], by_group[..., -1, :]
    q, k = rotated(q, args, yarn=yarn), rotated(k, args, yarn=yarn)
    return q, k.repeat_interleave(of_group, 2), v.repeat_interleave(of_group, 2)


def latent_heads(args, y: Tensor, of, linear, *, yarn: bool) -> tuple[Tensor, Tensor, Tensor, float]:
    """Queries, keys and values that are made of latents, and the scale of scores."""
    heads, plain, turned = args.num_attention_heads, args.qk_head_dim, args.qk_pos_emb_head_dim

    def normed(z, name):
        return norm(z, of(f"self_attention.{name}.weight")) if args.qk_layernorm else z

    def pairs(z):  # neighbouring channels turn together; the oracle turns channel i and i + half
        return rotated(torch.cat((z[..., 0::2], z[..., 1::2]), -1), args, yarn=yarn)

    if args.q_lora_rank:
        latent = normed(linear(y, "self_attention.linear_q_down_proj"), "q_layernorm")
        q = linear(latent, "self_attention.linear_q_up_proj")
    else:
        q = linear(y, "self_attention.linear_q_proj")
    q = q.unflatten(-1, (heads, plain + turned))
    latent, shared = linear(y, "self_attention.linear_kv_down_proj").split((args.kv_lora_rank, turned), -1)
    made = linear(normed(latent, "kv_layernorm"), "self_attention.linear_kv_up_proj")
    k, v = made.unflatten(-1, (heads, plain + args.v_head_dim)).split((plain, args.v_head_dim), -1)
    shared = pairs(shared[:, :, None]).expand(-1, -1, heads, -1)
    q = torch.cat((q[..., :plain], pairs(q[..., plain:])), -1)
    sharpened = temperature(args.rotary_scaling_factor, args.mscale_all_dim) ** 2
    return q, torch.cat((k, shared), -1), v, sharpened / math.sqrt(plain + turned)


def both(flags: str) -> tuple[float, float, dict[str, float]]:
    """The loss of megatron.core's model and of the oracle, and by name how far gradients are apart, of the largest."""
    from megatron.core import parallel_state
    from megatron.trainer.models import core_config, gpt

    parallel_state.initialize_model_parallel(1)
    try:
        args = replace(arguments(flags), padded_vocab_size=VOCABULARY)
        model = gpt.gpt_model(args, core_config.transformer_config(args))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        tokens = torch.randint(VOCABULARY, (2, LENGTH))
        own = model(tokens, torch.arange(LENGTH).expand_as(tokens), None, labels=tokens).sum()
        own.backward()
        weights = {name: each.detach().clone().requires_grad_() for name, each in model.named_parameters()}
        window = re.search(r"--window-size (\d+)", flags)
        theirs = oracle(args, weights, tokens, window and int(window[1]))
        theirs.backward()
        apart = {
            name: ((each.grad - weights[name].grad).abs().max() / weights[name].grad.abs().max()).item()
            for name, each in model.named_parameters()
        }
        return own.item(), theirs.item(), apart
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_the_formulas(name):
    """Of each weight, sinks and norms of latents included; the model sums in FP32, in another order."""
    ((own, theirs, apart),) = workers.run(1, f"{__name__}:both", flags=f"{COMMON} {MODELS[name]}")
    assert own == pytest.approx(theirs, rel=2e-6)
    assert max(apart.values()) < 2e-5, apart
    assert ("decoder.layers.0.self_attention.core_attention.softmax_offset" in apart) == ("learnable" in MODELS[name])


def generated(flags: str) -> tuple[list[int], list[int]]:
    """Greedy tokens with kept keys and values, and those of plain forwards of the whole sequence."""
    from megatron.core import parallel_state
    from megatron.trainer.models import core_config, generation, gpt

    parallel_state.initialize_model_parallel(1)
    try:
        args = replace(arguments(flags), padded_vocab_size=VOCABULARY)
        model = gpt.gpt_model(args, core_config.transformer_config(args)).eval()
        made = generation.TextGenerator(
            model, num_positions=LENGTH, vocab_size=VOCABULARY, device=torch.device("cpu")
        )  # fmt: skip
        found = list(made.stream([5, 9, 2], 16, generation.Sampling(temperature=0)))
        sequence = [5, 9, 2]
        with torch.no_grad():
            for _ in range(16):
                ids = torch.tensor([sequence])
                sequence.append(int(model(ids, torch.arange(len(sequence))[None], None)[0, -1].argmax()))
        return found, sequence[3:]
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("name", MODELS)
def test_generated_tokens_are_those_of_whole_forwards(name):
    """Keys and values that are kept have their own widths, and windows their places."""
    ((found, plain),) = workers.run(1, f"{__name__}:generated", flags=f"{COMMON} {MODELS[name]}")
    assert found == plain and len(set(found)) > 3
