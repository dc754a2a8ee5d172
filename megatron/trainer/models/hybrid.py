"""A GPT as megatron.core's HybridModel, whose layers are either attention or an MLP.

megatron.core itself splits its pattern of layers into stages by the rank. Here a stage has the layers that it would
have in a GPTModel, two HybridModel layers for each. They have the same initial weights, since an MLP draws from the
random stream where the attention before it has stopped, and they compute the same. The names of weights, and so
checkpoints, are those of the HybridModel.
"""

import dataclasses
from unittest import mock

from megatron.core.models.hybrid import hybrid_layer_allocation
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import LayerNormImpl
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.trainer.ranks import set_seeds

_OF_ATTENTION = ("input_layernorm", "self_attention", "self_attn_bda")
_OF_MLP = ("pre_mlp_layernorm", "mlp", "mlp_bda")


class _Stack(HybridStack):
    """megatron.core's stack with the final norm of a GPTModel, which may be torch's own."""

    def __init__(self, config: TransformerConfig, submodules: HybridStackSubmodules, **options) -> None:
        super().__init__(config, submodules, post_layer_norm=False, **options)
        self.post_layer_norm = True
        if self.post_process:
            self.final_norm = LayerNormImpl(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)


class _SeededAttention(TransformerLayer):
    """A layer of attention that draws from the stream of its GPT layer."""

    first_seed, distance = 0, 0

    def __init__(self, config: TransformerConfig, submodules: object, layer_number: int = 1, **options) -> None:
        set_seeds(self.first_seed + self.distance * ((layer_number + 1) // 2))
        super().__init__(config, submodules, layer_number, **options)


def build(layer: ModuleSpec, *, config: TransformerConfig, seed: int, distance: int, **options) -> HybridModel:
    """Build the part of the model for the stage that `config` describes.

    Args:
        layer: the specification of a layer of the GPTModel.
        seed, distance: layer n of the GPT, counted from 1, draws from the stream `seed + distance * n`.
        options: further arguments of the HybridModel.
    """
    cut = config.pipeline_model_parallel_layout
    first, num_layers = cut.get_layer_offset(), cut.get_num_layers_to_build()
    kinds = [hybrid_layer_allocation.Symbols.ATTENTION, hybrid_layer_allocation.Symbols.MLP] * num_layers
    attention = type("TransformerLayer", (_SeededAttention,), {"first_seed": seed, "distance": distance})
    parts = HybridStackSubmodules(
        attention_layer=ModuleSpec(attention, submodules=_only(layer, _OF_ATTENTION)),
        mlp_layer=ModuleSpec(MLPLayer, submodules=_only(layer, _OF_MLP)),
    )
    with mock.patch.object(
        hybrid_layer_allocation, "select_pipeline_segment", lambda *args, **kwargs: (kinds, 2 * first)
    ):
        return HybridModel(
            config=config,
            hybrid_stack_spec=ModuleSpec(_Stack, submodules=parts),
            hybrid_layer_pattern="".join(kinds),
            **options,
        )


def _only(layer: ModuleSpec, names: tuple[str, ...]) -> TransformerLayerSubmodules:
    """The parts `names` of a layer, with their names in checkpoints."""
    whole = layer.submodules
    keys = {old: new for old, new in whole.sharded_state_dict_keys_map.items() if old.split(".")[0] in names}
    nothing = TransformerLayerSubmodules()
    return dataclasses.replace(
        nothing, **{name: getattr(whole, name) for name in names}, sharded_state_dict_keys_map=keys
    )
