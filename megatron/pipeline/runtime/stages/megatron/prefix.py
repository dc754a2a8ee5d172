"""The last layers of a chunk alone, for a first stage of which the others' output is known."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import unwrap_model


@contextmanager
def without_first_layers(model: nn.Module, num_layers: int) -> Iterator[None]:
    """Within, a forward of the chunk of a first stage begins behind its first `num_layers` layers, with what was given
    to `set_input_tensor`: it neither embeds nor runs them. All that follows has the bits of a whole forward.
    """
    chunk = unwrap_model(model)
    (block,) = (module for module in chunk.modules() if isinstance(module, TransformerBlock))
    layers, first = block.layers, (chunk.pre_process, block.pre_process)
    assert 0 < num_layers < len(layers), f"a chunk of {len(layers)} layers cannot begin behind {num_layers} of them"
    block.layers = nn.ModuleList(list(layers)[num_layers:])
    chunk.pre_process = block.pre_process = False
    try:
        yield
    finally:
        block.layers = layers
        chunk.pre_process, block.pre_process = first
