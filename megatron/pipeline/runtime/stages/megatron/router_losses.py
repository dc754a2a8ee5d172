"""The auxiliary losses of the routers of experts: their factor in backwards, and their values for reports.

Problem: megatron.core adds these losses to the graph of every stage that has experts. Their factor is one global value.
Their values are summed in one global table, over layers and microbatches. A stage may run microbatches of several
batches in turn, and its rank may have several stages.

Solution: set the factor before each backward, and take the values out of the table after each forward that builds a
graph, and after each backward, in which layers may be recomputed.

Ranks that share a sequence (sequence and context parallelism) have parts of a loss. Gradients are summed over tensor
ranks and averaged over context parallel ranks, so the factor counts the latter. With per-token loss a router multiplies
its part by the number of its own tokens, and gradients are summed over all ranks and divided by the number of all
tokens; so the factor counts all ranks that share a sequence. (megatron.core's own schedules leave that out.)
"""

import torch
from torch import Tensor, nn

from megatron import backend
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_moe_layer_wise_logging_tracker
from megatron.core.utils import get_model_config

ROUTER_LOSSES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "z_loss",
}
"""Kind of a loss -> its name in megatron.core's table. Each is reported as the mean over layers and microbatches,
without its factor in the training loss."""


class RouterLosses:
    """The auxiliary losses of the layers of a stage.

    Args:
        model: the model chunk of the stage.
        takes: take the values out of megatron.core's table; else they stay there.
    """

    def __init__(self, model: nn.Module, *, takes: bool) -> None:
        self._has_experts = any(isinstance(module, MoELayer) for module in model.modules())
        self._takes = takes and self._has_experts
        self._num_shares = parallel_state.get_context_parallel_world_size()
        if self._has_experts and get_model_config(model).calculate_per_token_loss:
            self._num_shares = parallel_state.get_tensor_and_context_parallel_group().size()

    def scale(self, factor: float) -> None:
        """Multiply the losses by `factor` in the backward that comes, beside the main loss's own factor."""
        if self._has_experts:
            # `full` copies nothing from the host, so the host does not wait.
            MoEAuxLossAutoScaler.set_loss_scale(torch.full((), factor * self._num_shares, device=backend.device()))

    def take(self) -> dict[str, Tensor]:
        """Take the losses since the last call out of the table: name -> [sum, count], FP32, count in layers.

        Layers that have computed none since then are not counted: megatron.core recomputes layers in the backward, and
        has no losses in their forward then.

        Ranks that share tokens, of a sequence or of all replicas, have parts of a sum, which the first of them counts.
        Of the other losses each rank has a mean over its own tokens.
        """
        if not self._takes:
            return {}
        found = {}
        for name, entry in get_moe_layer_wise_logging_tracker().items():
            group = entry["reduce_group"]
            counts = group is None or group.rank() == 0
            values = entry["values"]
            found[name] = torch.stack([values.sum(), (values != 0).sum() * float(counts)])
            values.zero_()
        return found
