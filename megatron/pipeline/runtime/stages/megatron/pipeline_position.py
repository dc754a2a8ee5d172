"""The pipeline position that megatron.core sees: the position of a stage, on any rank.

Problem: megatron.core derives the stage of a chunk from the rank: stage = chunk x ranks + rank. The stage determines
the layer numbers, and so the names of weights in checkpoints. It also determines which chunk embeds, which chunk has
the loss, and which two copies of a tied embedding belong together. But a schedule may place its stages on any rank.

Solution: each chunk sees a pipeline with one rank per stage, and itself on the rank with the number of its stage.
`config_of_stage` sets this in the configuration. `at_stage` sets it in `parallel_state` while the chunk is built and
while it computes. The groups with which ranks communicate do not change.

`without_first_layers` lets the forward of the first stage begin after layers whose output is known.
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
from megatron.pipeline.runtime.copied_stages import CopyRanks
from megatron.pipeline.runtime.stages.megatron.auxiliary import stage_of_layers

_RANK, _SIZE = "_MPU_PIPELINE_MODEL_PARALLEL_RANK", "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"
_NUM_VIRTUAL = "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"
_GROUP, _EMBEDDING_GROUP = "_PIPELINE_MODEL_PARALLEL_GROUP", "_EMBEDDING_GROUP"


class StageLayout(PipelineParallelLayerLayout):
    """megatron.core's layout of layers with one stage per rank. It answers for `stage`, on any rank.

    Args:
        layers: the number of layers of each stage.
        stage: the stage for which questions are answered.
        further: the stage with layers of multi-token prediction, and the number of these.
    """

    def __init__(self, layers: Sequence[int], stage: int, further: tuple[int, int] | None = None) -> None:
        held = [[LayerType.decoder] * count for count in layers]
        held[0] = [LayerType.embedding, *held[0]]
        if further is not None:
            held[further[0]] += [LayerType.mtp] * further[1]
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
    """The group of the pipeline that a chunk sees. It has a rank and a size and cannot communicate."""

    def __init__(self, stage: int, num_stages: int) -> None:
        self._stage, self._num_stages = stage, num_stages

    def rank(self) -> int:
        return self._stage

    def size(self) -> int:
        return self._num_stages


def config_of_stage(config: TransformerConfig, stage: int, layers: Sequence[int]) -> TransformerConfig:
    """A copy of `config` for the chunk of one stage. `layers`: the number of layers of each stage."""
    own = copy(config)
    own.pipeline_model_parallel_size = len(layers)
    own.virtual_pipeline_model_parallel_size = None
    own.num_layers_in_first_pipeline_stage = own.num_layers_in_last_pipeline_stage = None
    own.account_for_embedding_in_pipeline_split = own.account_for_loss_in_pipeline_split = False
    with_further = stage_of_layers(config, len(layers))
    further = None if with_further is None else (with_further, config.mtp_num_layers)
    own.pipeline_model_parallel_layout = StageLayout(layers, stage, further)
    return own


@contextmanager
def at_stage(stage: int, num_stages: int, *, builds: bool = False) -> Iterator[None]:
    """In this block `parallel_state` gives the stage as the rank of the pipeline and the number of stages as its size.

    `builds`: a chunk is built in the block. Then `parallel_state` also gives a group with that position, which the
    chunk keeps, and no embedding group. The caller has to call `copy_tied_embeddings` afterwards.
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


def embedding_ranks(ranks: Sequence[int], rank_of_stage: Sequence[int], tied_stage: int | None = None) -> list[int]:
    """The ranks of the two stages of a pipeline that may share an embedding: the first stage and `tied_stage`.

    `tied_stage`: None means the last stage. The result is for `parallel_state.initialize_model_parallel`.
    """
    return sorted({ranks[rank_of_stage[0]], ranks[rank_of_stage[-1 if tied_stage is None else tied_stage]]})


def tied_embeddings(chunks: Sequence[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """This rank's copies of the embedding that two stages share, in the order of the stages.

    The first of the two is the first stage. The second is the last stage if its output layer is the embedding, or the
    stage with the layers of multi-token prediction, which look tokens up. The result has two copies if the rank has
    both stages, and none if the embedding is not shared.
    """
    copies = []
    for model in map(unwrap_model, chunks):
        is_first, looks_up = getattr(model, "pre_process", False), getattr(model, "mtp_process", False)
        ties = getattr(model, "share_embeddings_and_output_weights", False)
        is_copied = ties or getattr(getattr(model, "config", None), "mtp_num_layers", None)
        if looks_up or (is_first and is_copied) or (ties and getattr(model, "post_process", False)):
            copies.append(model.shared_embedding_or_output_weight())
    return copies


@torch.no_grad()
def copy_tied_embeddings(chunks: Sequence[torch.nn.Module]) -> None:
    """Copy a shared embedding from the first to the last stage. Collective over the embedding group.

    megatron.core has filled the copy of the last stage with zeros, so a sum copies it between ranks.
    """
    copies = tied_embeddings(chunks)
    group = parallel_state.get_embedding_group(check_initialized=False)
    if len(copies) == 2:
        copies[1].copy_(copies[0])
    elif copies and group is not None and group.size() > 1:
        dist.all_reduce(copies[0].data, group=group)


@torch.no_grad()
def copy_tied_embeddings_over(chunks: Sequence[torch.nn.Module], copies: CopyRanks) -> None:
    """As `copy_tied_embeddings`, where stages have copies. Collective over the ranks that `copies` names."""
    if not copies.tied:
        return
    [own] = tied_embeddings(chunks)
    is_first = any(getattr(model, "pre_process", False) for model in map(unwrap_model, chunks))
    told = own.clone() if is_first and copies.is_first(dist.get_rank()) else torch.zeros_like(own)
    dist.all_reduce(told, group=dist.new_group(copies.tied, use_local_synchronization=True))
    own.copy_(told)


@contextmanager
def without_first_layers(model: nn.Module, num_layers: int) -> Iterator[None]:
    """In this block the forward of the first stage's chunk begins after its first `num_layers` layers.

    Its input is the tensor given to `set_input_tensor`: the output of these layers. The embedding and the layers do not
    run. The results equal those of a whole forward bit for bit.
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
