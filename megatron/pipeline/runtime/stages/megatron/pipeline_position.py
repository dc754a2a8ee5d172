"""The pipeline position that megatron.core sees: that of a stage, whichever rank holds the stage.

Problem: megatron.core derives a stage from the rank: stage = chunk x ranks + rank. The stage decides layer numbers, and
so weights' names in checkpoints, which chunk embeds, which has the loss, and which two copies of a tied embedding
belong together. A schedule may put its stages anywhere.

Solution: each chunk is shown a pipeline with one rank for every stage, and itself on the rank that has its stage's
number. `config_of_stage` does so in the configuration, `at_stage` in `parallel_state`, while the chunk is built and
while it computes. The groups with which ranks communicate are untouched. `without_first_layers` lets the first stage
begin behind layers whose output is known.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy

import torch
import torch.distributed as dist
from torch import nn

from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

_RANK, _SIZE = "_MPU_PIPELINE_MODEL_PARALLEL_RANK", "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"
_NUM_VIRTUAL = "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"
_GROUP, _EMBEDDING_GROUP = "_PIPELINE_MODEL_PARALLEL_GROUP", "_EMBEDDING_GROUP"


class StageLayout(PipelineParallelLayerLayout):
    """The layers of the stages, one stage on each rank, as seen by one stage, whichever rank asks."""

    def __init__(self, layers: Sequence[int], stage: int) -> None:
        held = [[LayerType.decoder] * count for count in layers]
        held[0] = [LayerType.embedding, *held[0]]
        held[-1] = [*held[-1], LayerType.loss]
        super().__init__(held, len(layers))
        self._stage = stage

    def get_num_layers_to_build(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        return self.layout[self._stage][0].count(layer_type)

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        return sum(held.count(layer_type) for (held,) in self.layout[: self._stage])


class _StageGroup:
    """The pipeline's group as a chunk sees it: it tells rank and size, and nobody communicates with it."""

    def __init__(self, stage: int, num_stages: int) -> None:
        self._stage, self._num_stages = stage, num_stages

    def rank(self) -> int:
        return self._stage

    def size(self) -> int:
        return self._num_stages


def config_of_stage(config: TransformerConfig, stage: int, layers: Sequence[int]) -> TransformerConfig:
    """The configuration of one stage's chunk. `layers`: the number of layers of each stage."""
    own = copy(config)
    own.pipeline_model_parallel_size = len(layers)
    own.virtual_pipeline_model_parallel_size = None
    own.num_layers_in_first_pipeline_stage = own.num_layers_in_last_pipeline_stage = None
    own.account_for_embedding_in_pipeline_split = own.account_for_loss_in_pipeline_split = False
    own.pipeline_model_parallel_layout = StageLayout(layers, stage)
    return own


@contextmanager
def at_stage(stage: int, num_stages: int, *, builds: bool = False) -> Iterator[None]:
    """In this block `parallel_state` gives the stage as the pipeline's rank, and the number of stages as its size.

    builds: a chunk is built, which keeps the position that it sees; `copy_tied_embeddings` handles a tied embedding.
    """
    shown = {_RANK: stage, _SIZE: num_stages, _NUM_VIRTUAL: None}
    if builds:
        shown |= {_GROUP: _StageGroup(stage, num_stages), _EMBEDDING_GROUP: None}
    real = {name: getattr(parallel_state, name) for name in shown}
    vars(parallel_state).update(shown)
    try:
        yield
    finally:
        vars(parallel_state).update(real)


def embedding_ranks(ranks: Sequence[int], rank_of_stage: Sequence[int]) -> list[int]:
    """The ranks of a pipeline with word embeddings, those of the first and the last stage, for
    `parallel_state.initialize_model_parallel`."""
    return sorted({ranks[rank_of_stage[0]], ranks[rank_of_stage[-1]]})


def tied_embeddings(chunks: Sequence[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """The copies that this rank's chunks hold of an embedding that the first and the last stage share, in the order of
    the stages: none, one or, where it has both stages, two."""
    copies = []
    for model in map(unwrap_model, chunks):
        at_an_end = getattr(model, "pre_process", False) or getattr(model, "post_process", False)
        if at_an_end and getattr(model, "share_embeddings_and_output_weights", False):
            copies.append(model.shared_embedding_or_output_weight())
    return copies


@torch.no_grad()
def copy_tied_embeddings(chunks: Sequence[torch.nn.Module]) -> None:
    """Give the last stage the first one's embedding, where they share it. Collective over the embedding's ranks.

    megatron.core has filled the last stage's copy with zeros.
    """
    copies = tied_embeddings(chunks)
    group = parallel_state.get_embedding_group(check_initialized=False)
    if len(copies) == 2:
        copies[1].copy_(copies[0])
    elif copies and group is not None and group.size() > 1:
        dist.all_reduce(copies[0].data, group=group)


@contextmanager
def without_first_layers(model: nn.Module, num_layers: int) -> Iterator[None]:
    """In this block a forward of a first stage's chunk begins behind its first `num_layers` layers, with the tensor of
    `set_input_tensor`: it does not embed or run these layers. Its results equal a whole forward's bit for bit.
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
