"""`--pipeline-model-parallel-layout`: what each stage holds, in megatron.core's words, with errors for the user."""

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout


def parse_layout(text: str, *, num_ranks: int, num_layers: int) -> PipelineParallelLayerLayout:
    """What megatron.core reads from `text`, for a pipeline of `num_ranks` ranks and a model of `num_layers` layers.

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
    for rank, stages in enumerate(layout.layout):
        if not any(stages):
            raise ValueError(
                f"--pipeline-model-parallel-layout {text} leaves rank {rank} of the pipeline nothing to hold; give one "
                "of its stages a layer, or use fewer ranks"
            )
    return layout
