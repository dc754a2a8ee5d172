"""The contributions of experts' routers and of multi-token prediction to losses and reports.

**Losses of routers.** Problem: megatron.core adds auxiliary losses to the graph of every stage that has experts. Their
factor is one global value. Their values are summed in one global table, over layers and microbatches. A stage may run
microbatches of several batches in turn, and its rank may have several stages.

Solution: set the factor before each backward, and take the values out of the table after each forward that builds a
graph, and after each backward, in which layers may be recomputed.

Ranks that share a sequence (sequence and context parallelism) have parts of a loss. Gradients are summed over tensor
ranks and averaged over context parallel ranks, so the factor counts the latter. With per-token loss a router multiplies
its part by the number of its own tokens, and gradients are summed over all ranks and divided by the number of all
tokens; so the factor counts all ranks that share a sequence. (megatron.core's own schedules leave that out.)

**Tokens**, and the biases that they move. Problem: megatron.core's routers add to one set of counters. At the end of a
batch `finalize_model_grads` moves the biases by these counters and resets the counters. But no program here calls
`finalize_model_grads`, and under 2bw two batches are in flight.

Solution: counters of each batch, to which the routers of a rank point while they run a microbatch of that batch. A
forward counts only if it builds a graph, so a recomputed layer counts once. The counts are summed over the job with
the norm of the batch. A layer lies on one stage, so this is the sum over tensor, context and data ranks. Each weight
version has its biases. Every rank has the biases of all layers, since all ranks have the sums. DeepSeek-V3 (2024),
section 2.1.2.

**Multi-token prediction.** Problem: megatron.core adds the losses of these layers to the graph of the last stage. As
with the losses of routers, their factor is one global value that its own schedules set, and their values are summed in
one global table, over microbatches of whichever batches are in flight.

Solution: a stage sets the factor before each backward, and empties the table after each forward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron import backend
from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_moe_layer_wise_logging_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config, unwrap_model

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
        """Let the next backward multiply these losses by `factor`. The main loss has a factor of its own."""
        if self._has_experts:
            # `full` copies nothing from the host, so the host does not wait.
            MoEAuxLossAutoScaler.set_loss_scale(torch.full((), factor * self._num_shares, device=backend.device()))

    def take(self) -> dict[str, Tensor]:
        """Take the losses since the last call out of the table: name -> [sum, count], FP32, count in layers.

        Layers that have computed no loss since then are not counted: a layer that megatron.core recomputes has its loss
        in the backward, and none in the forward.

        If a loss is over the tokens of several ranks (of one sequence, or of all replicas), each of these ranks has a
        part of the sum, and only the first counts its layers. For other losses each rank has the mean over its own
        tokens and counts its layers.
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


@dataclass
class _Counters:
    """The counters of a batch, FP32; a row for each router of the rank."""

    tokens: Tensor  # [routers, experts], of this rank
    global_tokens: Tensor  # [routers, experts], of all replicas, for `global_aux_loss`
    steps: Tensor  # [routers], the microbatches in `global_tokens`


class RouterTokens:
    """The counters and biases of the routers of a rank.

    Args:
        chunks: the model chunks of the rank, whose layers have experts on this rank or on another.
        window: the number of weight versions whose biases are kept.
        lag: how many versions the biases are behind the weights; 1 for predicted weights, whose biases are not
            predicted: they are those of the true weights from which the prediction starts.
    """

    def __init__(self, chunks: Sequence[nn.Module], *, window: int, lag: int) -> None:
        config = chunks[0].config
        self._num_experts = config.num_moe_experts
        self._num_layers = config.num_layers + (config.mtp_num_layers or 0)  # those of multi-token prediction come last
        self._rate = config.moe_router_bias_update_rate
        self._window, self._lag = window + lag, lag
        self._routers = [each for chunk in chunks for each in chunk.modules() if isinstance(each, TopKRouter)]
        self._rows = [router.layer_number - 1 for router in self._routers]
        self._batches: dict[int, _Counters] = {}
        self._shown_batch: _Counters | None = None
        self.has_biases = config.moe_router_enable_expert_bias
        for router in self._routers:
            router._maintain_float32_expert_bias()
            router.enable_expert_bias = True  # this alone makes megatron.core count
        self._biases: dict[int, Tensor] = {}  # version -> FP32 [layers, experts] on the host
        self._on_device: dict[int, Tensor] = {}  # version -> the rows of the routers, which they show
        self._shown_version: int | None = None
        if self.has_biases:
            self._set(0, torch.zeros(self._num_layers, self._num_experts))
            self._show(0)

    def show_batch(self, batch: int) -> None:
        """Make the routers add to the counters of `batch`, which are 0 before its first computation."""
        counters = self._batches.get(batch)
        if counters is None:
            zeros = torch.zeros(2, len(self._routers), self._num_experts, device=backend.device())
            counters = self._batches[batch] = _Counters(*zeros, torch.zeros(len(zeros[0]), device=zeros.device))
        if counters is self._shown_batch:
            return
        self._shown_batch = counters
        for row, router in enumerate(self._routers):
            router.local_tokens_per_expert = counters.tokens[row]
            if router.global_tokens_per_expert is not None:
                router.global_tokens_per_expert = counters.global_tokens[row]
                router.ga_steps = counters.steps[row]

    def take(self, batch: int) -> list[float]:
        """Remove the counters of a batch whose backwards are done. Return this rank's counts, layer by layer."""
        counters = self._batches.pop(batch, None)
        result = torch.zeros(self._num_layers, self._num_experts, dtype=torch.float64)
        if counters is not None and self._routers:
            result.index_add_(0, torch.tensor(self._rows), counters.tokens.double().cpu())
        return result.flatten().tolist()

    def abandon(self) -> None:
        """Drop the counters of batches in flight, which are computed again."""
        self._batches.clear()
        self._shown_batch = None

    def by_layer(self, counts: Sequence[float]) -> tuple[tuple[int, ...], ...]:
        """The summed counts of `take` as [layers][experts]; a layer without experts has zeros."""
        return tuple(tuple(map(int, row)) for row in torch.tensor(counts).view(self._num_layers, -1).tolist())

    def load(self, version: int) -> None:
        """Show the biases that belong to the weights of `version`."""
        if self.has_biases:
            self._show(max(version - self._lag, min(self._biases)))

    def show_newest(self) -> None:
        """Show the biases of the newest true weights."""
        if self.has_biases:
            self._show(max(self._biases))

    def step(self, version: int, tokens: Sequence[Sequence[int]]) -> None:
        """Make the biases of `version` from those of the version before, as megatron.core does.

        Called for every batch, also if the step of the weights is skipped.

        `tokens`: the tokens of each expert over the batch and the job, [layers][experts].
        """
        if not self.has_biases:
            return
        counts = torch.tensor(tokens, dtype=torch.float32)
        offset = counts.sum(dim=-1, keepdim=True) / self._num_experts - counts
        self._set(version, self._biases[version - 1] + torch.sign(offset) * self._rate)
        for old in [each for each in self._biases if each <= version - self._window]:
            del self._biases[old], self._on_device[old]

    def state_dict(self) -> dict:
        """The biases of all versions, by their age; equal on all ranks. The model has only the newest biases."""
        newest = max(self._biases, default=0)
        return {"older_expert_biases": {newest - each: bias.tolist() for each, bias in self._biases.items()}}

    def restore(self, newest: int, state: Mapping | None) -> None:
        """Restore the biases of version `newest` and of older versions.

        The biases come from `state`, a result of `state_dict`. If it lacks the newest biases, as older checkpoints do,
        the routers show them, and the call is collective over the job. Other biases that it lacks equal the newest.
        """
        if not self.has_biases:
            return
        older = (state or {}).get("older_expert_biases", {})
        bias = torch.tensor(older[0]) if 0 in older else self._shown_everywhere()
        self._biases, self._on_device = {}, {}
        for age in range(min(self._window - 1, newest), 0, -1):
            self._set(newest - age, torch.tensor(older[age]) if age in older else bias.clone())
        self._set(newest, bias)
        self._shown_version = None
        self._show(newest)

    def _shown_everywhere(self) -> Tensor:
        """The biases that the routers of all ranks show. Collective over the job."""
        bias = torch.full((self._num_layers, self._num_experts), -torch.inf, device=backend.device())
        for row, router in zip(self._rows, self._routers, strict=True):
            bias[row] = router.expert_bias
        dist.all_reduce(bias, op=dist.ReduceOp.MAX)
        return bias.cpu().nan_to_num(neginf=0.0)  # of layers without experts

    def _set(self, version: int, bias: Tensor) -> None:
        self._biases[version] = bias
        rows = bias[self._rows]
        # Copied from pinned memory, so that the host does not wait for the device.
        self._on_device[version] = (rows.pin_memory() if backend.is_cuda() else rows).to(
            backend.device(), non_blocking=True
        )

    def _show(self, version: int) -> None:
        if version != self._shown_version:
            for row, router in enumerate(self._routers):
                router.expert_bias = self._on_device[version][row]
            self._shown_version = version


def loss_names(num_layers: int | None) -> tuple[str, ...]:
    """The names of the losses of a model with `num_layers` layers, as in Megatron-LM."""
    return tuple(f"mtp_{number + 1} loss" for number in range(num_layers or 0))


def stage_of_layers(config: TransformerConfig, num_stages: int) -> int | None:
    """The stage with the layers of multi-token prediction; None if the model has no such layers.

    It is the last stage, unless the layout of the model names another.
    """
    if not config.mtp_num_layers:
        return None
    layout = config.pipeline_model_parallel_layout
    if layout is None or num_stages == 1:
        return num_stages - 1
    in_order = [held for chunk in zip(*layout.layout, strict=True) for held in chunk]
    return next(stage for stage, held in enumerate(in_order) if LayerType.mtp in held)


def drop_unread_output_weight(model: nn.Module) -> None:
    """Remove an output layer's own weight if the layer multiplies by the chunk's copy of the embedding instead.

    megatron.core allocates the weight although it reads only the copy, unless the chunk is the first stage.
    """
    if getattr(model, "mtp_process", False) and model.post_process and model.share_embeddings_and_output_weights:
        model.output_layer.weight = None


def predict_next_token_only(model: nn.Module) -> None:
    """Make a whole model skip its layers of multi-token prediction, which need the labels of a training."""
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
        """Let the next backward multiply these losses by `factor`. The main loss has a factor of its own."""
        if self._names:
            # `full` copies nothing from the host, so the host does not wait.
            MTPLossAutoScaler.set_loss_scale(torch.full((), factor, device=backend.device()))

    def take(self) -> dict[str, Tensor]:
        """Take the losses of the last forward out of the table: name -> [mean over its tokens, 1], FP32.

        All tensor ranks compute the same losses, and the first of them counts. Evaluations have none.
        """
        table = MTPLossLoggingHelper.tracker if self._names else {}
        taken = table.pop("values", table.pop("loss_values", None))  # the name from core 0.19 on
        if taken is None or parallel_state.get_tensor_model_parallel_rank() != 0:
            return {}
        pairs = torch.stack([taken, torch.ones_like(taken)], dim=1)
        return dict(zip(self._names, pairs, strict=True))
