"""Flags of mixtures of experts: layers in which a router sends each token to a few of many MLPs."""

import ast
from dataclasses import dataclass

from megatron.trainer.arguments.flags.specification import Group, Role, option, switch

LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
"""The kinds of load balancing that training supports."""


def has_experts(pattern: int | list[int], num_layers: int) -> list[bool]:
    """Whether each layer has experts, for a value of `--moe-layer-freq`."""
    if isinstance(pattern, int):
        return [layer % pattern == 0 for layer in range(num_layers)]
    return [bool(each) for each in pattern]


def pattern_of_layers(text: str, flag: str) -> int | list[int]:
    """Parse `--moe-layer-freq` or `--window-attn-skip-freq`: a number, or a list of 1 and 0 as `([0]*1+[1]*3)*2`.

    Raises ValueError that names the flag.
    """
    try:
        found = _evaluated(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError):
        found = None
    if isinstance(found, list) and len(found) <= _MOST_LAYERS and all(type(each) is int for each in found):
        return found
    if type(found) is int:
        return found
    raise ValueError(f"{flag} {text} is no pattern; give a number, or lists as ([0]*1+[1]*3)*2")


_MOST_LAYERS = 10_000


def _evaluated(node: ast.AST) -> int | list:
    """Evaluate an expression of integers, lists, sums of lists, and lists times integers."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_evaluated(each) for each in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = _evaluated(node.left), _evaluated(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and type(right) is int:
            if len(left) * right > _MOST_LAYERS:
                raise ValueError(right)
            return left * right
    raise ValueError(node)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Experts:
    """Layers with experts: a router sends each token to a few of many MLPs."""

    num_experts: int | None = option(None, "Experts of a layer with experts. Default: no layer has any.")
    moe_layer_freq: str | int | list[int] = option(
        "1", "The layers with experts: every n-th from the first on, or a list of 1 and 0 as ([0]*1+[1]*3)*2."
    )
    moe_ffn_hidden_size: int | None = option(None, "Width of an expert's hidden layer. Default: --ffn-hidden-size.")
    moe_shared_expert_intermediate_size: int | None = option(
        None, "Width of an expert that computes every token, beside the routed ones. Default: there is none."
    )
    moe_router_topk: int = option(2, "Experts that compute a token.")
    moe_router_pre_softmax: bool = switch("Take the softmax before the choice of experts, and not after it.")
    moe_router_score_function: str = option(
        "softmax", "What makes scores of the router's logits.", choices=("softmax", "sigmoid")
    )
    moe_router_topk_scaling_factor: float | None = option(None, "Factor of the chosen experts' scores.")
    moe_router_num_groups: int | None = option(
        None, "Groups of experts, of which a token takes --moe-router-group-topk."
    )
    moe_router_group_topk: int | None = option(None, "Groups from which a token's experts are chosen.")
    moe_router_force_load_balancing: bool = switch(
        "Choose experts by random scores, so that their loads are about equal: to measure speed, not to train.",
        roles=Role.SAVED,
    )
    moe_apply_probs_on_input: bool = switch("Multiply an expert's input by its score, and not its output. Needs top 1.")
    moe_router_load_balancing_type: list[str] = option(
        ["aux_loss"],
        "How tokens are balanced over experts: by a loss over a microbatch (aux_loss), over each sequence "
        "(seq_aux_loss) or over the batch so far on all replicas (global_aux_loss), or several of these; by sinkhorn's "
        "routing; or none.",
        nargs="+",
        roles=Role.SAVED,
    )
    moe_aux_loss_coeff: list[float] = option(
        [0.0], "Factor of each loss of --moe-router-load-balancing-type.", nargs="+", roles=Role.SAVED
    )
    moe_router_enable_expert_bias: bool = switch(
        "Add a bias to each expert's score where experts are chosen, and move it after each batch towards equal loads."
    )
    moe_router_bias_update_rate: float = option(
        1e-3, "By what a batch moves a bias of --moe-router-enable-expert-bias.", roles=Role.SAVED
    )
    moe_z_loss_coeff: float | None = option(
        None, "Factor of a loss that keeps the router's logits small.", roles=Role.SAVED
    )
    moe_router_dtype: str | None = option(
        None,
        "Type in which scores are computed and outputs are weighted. Default: the model's.",
        choices=("fp32", "fp64"),
        roles=Role.SAVED,
    )
    moe_expert_capacity_factor: float | None = option(
        None, "Most tokens of an expert, over its balanced load; further tokens are dropped.", roles=Role.SAVED
    )
    moe_pad_expert_input_to_capacity: bool = switch("Give each expert as many tokens as its capacity.", roles=Role.NONE)
    moe_token_drop_policy: str = option(
        "probs",
        "Which tokens an expert drops: those of the least score, or the last.",
        choices=("probs", "position"),
        roles=Role.SAVED,
    )
    moe_token_dispatcher_type: str = option(
        "allgather",
        "How tokens are brought to experts: allgather, alltoall, or flex, which needs the package deep_ep on GPUs.",
        roles=Role.PRICED,
    )
    expert_model_parallel_size: int = option(
        1,
        "Ranks that share out the experts of a layer and send each other tokens. Divides the number of replicas, times "
        "--tensor-model-parallel-size over --expert-tensor-parallel-size.",
        roles=Role.PRICED,
    )
    expert_tensor_parallel_size: int | None = option(
        None,
        "Tensor ranks that cut each expert: all of them, the default, or 1, so that they share out whole experts, too.",
        roles=Role.PRICED,
    )
    moe_flex_dispatcher_backend: str = option(
        "deepep", "The package of --moe-token-dispatcher-type flex.", choices=("deepep",), roles=Role.NONE
    )
    moe_deepep_num_sms: int = option(
        20, "Multiprocessors that send tokens with --moe-token-dispatcher-type flex.", roles=Role.NONE
    )
    moe_enable_deepep: bool = switch("Old name of --moe-flex-dispatcher-backend deepep.", roles=Role.NONE)
    moe_grouped_gemm: bool = switch(
        "Multiply the tokens of all experts in one kernel. Off without Transformer Engine.", roles=Role.NONE
    )
    moe_permute_fusion: bool = switch(
        "Fuse the permutation of tokens. Off without Transformer Engine.", roles=Role.NONE
    )
    moe_router_padding_for_quantization: bool = switch(
        "With FP8, route further tokens to experts, at a score of 0, so that each has a multiple of 16 or 32, in place "
        "of rows of zeros.",
        aliases=("--moe-router-padding-for-fp8",),
        roles=Role.NONE,
    )
    moe_router_fusion: bool = switch("Fuse the router's operations. Off without Transformer Engine.", roles=Role.NONE)


EXPERTS = Group.of(Experts, "experts", Role.SHAPE)
