"""Multi-token prediction in stages: which stage has its layers, the factor of its losses, and their values for reports.

Problem: megatron.core adds the losses of these layers to the graph of the last stage. As with the losses of routers,
their factor is one global value that its own schedules set, and their values are summed in one global table, over
microbatches of whichever batches are in flight.

Solution: a stage sets the factor before each backward, and empties the table after each forward.
"""

import torch
from torch import Tensor, nn

from megatron import backend
from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model


def loss_names(num_layers: int | None) -> tuple[str, ...]:
    """What the losses of so many layers are called, as in Megatron-LM."""
    return tuple(f"mtp_{number + 1} loss" for number in range(num_layers or 0))


def stage_of_layers(config: TransformerConfig, num_stages: int) -> int | None:
    """The stage that has the layers of multi-token prediction: the last, unless the layout of the model says another;
    None if there are none."""
    if not config.mtp_num_layers:
        return None
    layout = config.pipeline_model_parallel_layout
    if layout is None or num_stages == 1:
        return num_stages - 1
    in_order = [held for chunk in zip(*layout.layout, strict=True) for held in chunk]
    return next(stage for stage, held in enumerate(in_order) if LayerType.mtp in held)


def drop_unread_output_weight(model: nn.Module) -> None:
    """Take away an output layer's own weight if the layer multiplies by the copy of the embedding beside it.

    megatron.core reads the copy, and makes the weight all the same unless the chunk is the first stage.
    """
    if getattr(model, "mtp_process", False) and model.post_process and model.share_embeddings_and_output_weights:
        model.output_layer.weight = None


def predict_next_token_only(model: nn.Module) -> None:
    """Make a whole model leave its layers of multi-token prediction out, which have labels to predict in a training."""
    model.mtp_process, model.config.mtp_num_layers = False, None


class MultiTokenLosses:
    """The losses of multi-token prediction of a stage; only the stage with the output layer has any.

    Args:
        model: the model chunk of the stage.
        config: its configuration.
    """

    def __init__(self, model: nn.Module, config: TransformerConfig) -> None:
        has_output = getattr(unwrap_model(model), "post_process", False)
        self._names = loss_names(config.mtp_num_layers) if has_output else ()

    def scale(self, factor: float) -> None:
        """Multiply the losses by `factor` in the backward that comes, beside the main loss's own factor."""
        if self._names:
            # `full` copies nothing from the host, so the host does not wait.
            MTPLossAutoScaler.set_loss_scale(torch.full((), factor, device=backend.device()))

    def take(self) -> dict[str, Tensor]:
        """Take the losses of the last forward out of the table: name -> [mean over its tokens, 1], FP32.

        All tensor ranks compute the same losses, and the first of them counts. Evaluations have none.
        """
        taken = MTPLossLoggingHelper.tracker.pop("values", None) if self._names else None
        if taken is None or parallel_state.get_tensor_model_parallel_rank() != 0:
            return {}
        pairs = torch.stack([taken, torch.ones_like(taken)], dim=1)
        return dict(zip(self._names, pairs, strict=True))
