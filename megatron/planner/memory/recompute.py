"""The part of a forward that a backward computes again: modules of layers, whole layers, or whole stages."""

from dataclasses import dataclass
from enum import Enum

CORE_ATTENTION, MLP, NORM, LATENTS_UP, EXPERTS = "core_attn", "mlp", "layernorm", "mla_up_proj", "moe"
EVERY_OTHER_PRODUCT = "every_other_product"  # torchtitan's selective recomputation, in place of modules


class RecomputeScope(str, Enum):
    """The part of a layer that a backward recomputes, in BPipe's terms: nothing, the core of attention (Korthikanti's
    selective recomputation), or whole layers (full recomputation)."""

    NONE = "none"
    ATTENTION = "attention"
    LAYER = "layer"


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """The part of the forward that a backward recomputes, as set by Megatron's flags.

    Attributes:
        modules: recomputed modules of every layer: `core_attn`, `mlp`, `layernorm`, `mla_up_proj`, `moe`; or
            `every_other_product` alone: everything but the attention and every other matrix product.
        method: recomputes whole layers: `uniform`, in chunks of `num_layers`, or `block`, the first `num_layers` of
            each stage; None: no whole layers.
        num_layers: layers of a chunk (`uniform`), or recomputed layers of a stage (`block`).
        whole_stage: instructions of the program recompute a stage from its input.
    """

    modules: frozenset[str] = frozenset()
    method: str | None = None
    num_layers: int = 1
    whole_stage: bool = False

    @classmethod
    def of(cls, scope: RecomputeScope) -> "Recompute":
        """The recomputation of a scope as papers define it: whole layers are recomputed one by one."""
        modules = frozenset({CORE_ATTENTION}) if scope is RecomputeScope.ATTENTION else frozenset()
        return cls(modules=modules, method="uniform" if scope is RecomputeScope.LAYER else None)

    @property
    def scope(self) -> str:
        """The name of the scope in BPipe's terms (none, attention or layer), the names of the modules, or stage."""
        if self.whole_stage:
            return "stage"
        if self.method is not None:
            return "layer"
        return {frozenset(): "none", frozenset({CORE_ATTENTION}): "attention"}.get(
            self.modules, "+".join(sorted(self.modules))
        )


NOTHING = Recompute()
