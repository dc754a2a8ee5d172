"""megatron.core's layers with experts, built on a CPU: what tests compare the planner's counts with."""

from functools import partial

import torch

from megatron.planner import Architecture
from megatron.planner.memory.architecture import Experts

LENGTH, SIZE = 64, 2
"""Tokens of a sequence, and sequences of a microbatch."""


def shape_of(num_layers: int = 2, gated: bool = True, **experts: object) -> Architecture:
    """Without biases and dropout, since experts have neither; 4 experts of which a token takes 2, unless said."""
    return Architecture(
        num_layers=num_layers, hidden_size=128, ffn_hidden_size=192, num_attention_heads=4, num_query_groups=4,
        kv_channels=32, sequence_length=LENGTH, vocabulary_size=256, tied_embeddings=False, gated=gated,
        linear_biases=False, hidden_dropout=False, attention_dropout=False,
        experts=Experts(**{"count": 4, "topk": 2, "ffn_hidden_size": 96, **experts}),
    )  # fmt: skip


def block(shape: Architecture, *, tensor: int, expert: int, expert_tensor: int, fused: bool = False) -> torch.nn.Module:
    """The transformer block of such a model, on this rank of the groups that are initialized. `fused`: activations
    have kernels of their own."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.trainer.ranks import set_seeds

    set_seeds(1)
    experts = shape.experts
    config = TransformerConfig(
        num_layers=shape.num_layers, hidden_size=shape.hidden_size, ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads, add_bias_linear=False, hidden_dropout=0.0,
        attention_dropout=0.0, gated_linear_unit=shape.gated,
        activation_func=torch.nn.functional.silu if shape.gated else torch.nn.functional.gelu,
        bias_activation_fusion=fused, num_moe_experts=experts.count, moe_router_topk=experts.topk,
        moe_router_pre_softmax=experts.topk == 1,
        moe_ffn_hidden_size=experts.ffn_hidden_size,
        moe_shared_expert_intermediate_size=experts.shared_ffn_hidden_size or None,
        moe_layer_freq=list(experts.layers) if isinstance(experts.layers, tuple) else experts.layers,
        moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none", use_cpu_initialization=True,
        tensor_model_parallel_size=tensor, sequence_parallel=tensor > 1, expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
    )  # fmt: skip
    specification = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    return TransformerBlock(config, specification, pre_process=False, post_process=False)


def parameters_case(tensor: int, expert: int, expert_tensor: int, shapes: list[Architecture]) -> list[tuple[int, int]]:
    """Of each shape the elements of all parameters of the layers on this rank, and of those that are of experts."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor, expert_model_parallel_size=expert, expert_tensor_parallel_size=expert_tensor
    )
    try:
        counts = []
        for shape in shapes:
            made = block(shape, tensor=tensor, expert=expert, expert_tensor=expert_tensor)
            named = {name: parameter.numel() for name, parameter in made.named_parameters()}
            counts.append((sum(named.values()), sum(size for name, size in named.items() if ".experts." in name)))
        return counts
    finally:
        parallel_state.destroy_model_parallel()


def captured_case(tensor: int, cases: list[tuple[Architecture, bool]]) -> list[int]:
    """Bytes that the layers of each shape save of a microbatch on this rank; with or without fused activations."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils
    from tests.planner.memory.test_activations import _captured_bytes

    moe_utils.te_general_gemm = None  # which it asks for where Transformer Engine is not installed, too
    parallel_state.initialize_model_parallel(tensor, expert_tensor_parallel_size=tensor)
    try:
        found = []
        for shape, fused in cases:
            made = block(shape, tensor=tensor, expert=1, expert_tensor=tensor, fused=fused)
            hidden = torch.randn(LENGTH // tensor, SIZE, shape.hidden_size).requires_grad_()
            mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
            made.set_input_tensor(hidden)
            found.append(_captured_bytes(made, partial(made, None, mask), num_keys=LENGTH))
        return found
    finally:
        parallel_state.destroy_model_parallel()
