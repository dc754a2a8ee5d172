"""What a search prices and the trainer refuses, from flags: context parallelism and experts."""

import argparse
import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.planner.job.software import ALL_TO_ALL, FLEX
from megatron.planner.memory.architecture import Experts
from megatron.trainer.arguments.flags.specification import Flag

_TOPK = 2  # Megatron-LM's default
_OF_EXPERTS = (
    "moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq", "moe_expert_capacity_factor",
    "moe_shared_expert_intermediate_size", "overlap_moe_expert_parallel_comm",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PricedFlags:
    """Flags that a user gave, and what they ask for.

    Attributes:
        written: those that ask for something, as the user wrote them.
        context, expert, expert_tensor: degrees, as a configuration has them.
        gathers_keys, dispatcher, overlaps_experts: as in `Software`.
        experts: of what they say; `ffn_hidden_size` is 0 where they are as wide as the model's MLP.
    """

    written: tuple[str, ...] = ()
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    gathers_keys: bool = False
    dispatcher: str = ALL_TO_ALL
    overlaps_experts: bool = False
    experts: Mapping[str, object] | None = None

    def experts_of(self, ffn_hidden_size: int) -> Experts | None:
        """The experts of a model with such an MLP. Raises ValueError."""
        if self.experts is None:
            return None
        return Experts(**{"ffn_hidden_size": ffn_hidden_size, **self.experts})


def read_priced(given: argparse.Namespace, flags: Sequence[tuple[Flag, tuple[str, ...]]]) -> PricedFlags:
    """From parsed flags, and those of them that are priced with how they were written.

    Raises:
        ValueError: a value that is none, flags of experts without experts, or what has no price.
    """
    written = tuple(" ".join(words) for flag, words in flags if getattr(given, flag.dest) not in (*flag.neutral, False))
    names = {flag.dest: flag.name for flag, _ in flags}
    values = {name: getattr(given, name) for name in names}
    kind = values.get("cp_comm_type") or ["p2p"]
    if set(kind) - {"p2p", "all_gather"} or len(set(kind)) > 1:
        raise ValueError(f"--cp-comm-type {' '.join(kind)} has no price; give p2p or all_gather")
    dispatcher = values.get("moe_token_dispatcher_type", ALL_TO_ALL)
    if dispatcher not in (ALL_TO_ALL, FLEX):
        raise ValueError(f"--moe-token-dispatcher-type {dispatcher} has no price; give {ALL_TO_ALL} or {FLEX}")
    for name in ("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "num_experts"):
        least = 0 if name == "num_experts" else 1
        if values.get(name) is not None and values[name] < least:
            raise ValueError(f"{names[name]} {values[name]} is below {least}; give 1 or more")
    experts = _experts(values) if values.get("num_experts") else None
    if experts is None:
        lone = next((names[name] for name in names if name in _OF_EXPERTS), None)
        if lone is None and (values.get("expert_model_parallel_size") or 1) > 1:
            lone = names["expert_model_parallel_size"]
        if lone is None and dispatcher != ALL_TO_ALL:
            lone = f"{names['moe_token_dispatcher_type']} {dispatcher}"
        if lone is not None:
            raise ValueError(f"{lone} is given, and --num-experts is not; give both, or neither")
    return PricedFlags(
        written=written,
        context=values.get("context_parallel_size") or 1,
        expert=values.get("expert_model_parallel_size") or 1,
        expert_tensor=values.get("expert_tensor_parallel_size") if experts is not None else None,
        gathers_keys="all_gather" in kind,
        dispatcher=dispatcher,
        overlaps_experts=values.get("overlap_moe_expert_parallel_comm", False),
        experts=experts,
    )


def _experts(values: Mapping[str, object]) -> dict[str, object]:
    topk, width, shared, capacity, pattern = (values.get(name) for name in (
        "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_expert_capacity_factor",
        "moe_layer_freq",
    ))  # fmt: skip
    found = {
        "count": values["num_experts"],
        "topk": _TOPK if topk is None else _whole("--moe-router-topk", topk),
        "layers": 1 if pattern is None else layers_with_experts(pattern),
        "shared_ffn_hidden_size": 0 if shared is None else _whole("--moe-shared-expert-intermediate-size", shared),
        "capacity_factor": None if capacity is None else _number("--moe-expert-capacity-factor", capacity),
    }
    return found if width is None else {**found, "ffn_hidden_size": _whole("--moe-ffn-hidden-size", width)}


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} {text} is no whole number; give one") from None


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} {text} is no number; give one") from None


def layers_with_experts(text: str) -> int | tuple[int, ...]:
    """What `--moe-layer-freq` says: every n-th layer, or a list of 1 and 0 as `([0]*1+[1]*3)*2`. Raises ValueError."""
    try:
        found = _evaluated(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError):
        found = None
    if isinstance(found, list) and len(found) <= _MOST_LAYERS and all(type(each) is int for each in found):
        return tuple(found)
    if type(found) is int:
        return found
    raise ValueError(f"--moe-layer-freq {text} is no pattern; give a number, or lists as ([0]*1+[1]*3)*2")


_MOST_LAYERS = 10_000


def _evaluated(node: ast.AST) -> int | list:
    """Of numbers, lists, sums of lists and lists times numbers."""
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
