"""`--pipeline-model-parallel-layout`: what each stage holds, in megatron.core's words, with errors for the user."""

from collections.abc import Callable, Sequence

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.pipeline.program.stages import stages_of


def parse_layout(
    text: str, *, num_ranks: int, num_layers: int, placement: Callable[[int, int], Sequence[int]]
) -> PipelineParallelLayerLayout:
    """What megatron.core reads from `text`, for a pipeline of `num_ranks` ranks and a model of `num_layers` layers.

    `placement`, of `PLACEMENTS`, says which rank holds which stage.

    Raises:
        ValueError: a letter that it does not know, a number of stages that the ranks do not divide, or not exactly
            the embedding at the beginning, `num_layers` layers and the loss at the end; a rank with nothing at all.
    """
    try:
        layout = PipelineParallelLayerLayout(text, num_ranks)
        layout.validate_layer_layout(num_layers=num_layers, mtp_num_layers=None)
    except (AssertionError, IndexError) as error:
        raise ValueError(
            f"--pipeline-model-parallel-layout {text}: {error}; write E, {num_layers} times t and L, with | between "
            f"stages, as many as {num_ranks} ranks divide"
        ) from error
    if LayerType.embedding not in layout.layout[0][0] or LayerType.loss not in layout.layout[-1][-1]:
        raise ValueError(
            f"--pipeline-model-parallel-layout {text} begins or ends with an empty stage; the first stage holds E and "
            "the last one L"
        )
    num_virtual = layout.virtual_pipeline_model_parallel_size
    rank_of_stage = placement(num_ranks, num_virtual)
    held = [layout.layout[stage % num_ranks][stage // num_ranks] for stage in range(num_ranks * num_virtual)]
    for rank in range(num_ranks):
        if not any(held[stage] for stage in stages_of(rank_of_stage, rank)):
            raise ValueError(
                f"--pipeline-model-parallel-layout {text} leaves rank {rank} of the pipeline nothing to hold; give one "
                "of its stages a layer, or use fewer ranks"
            )
    return layout
