"""The model of the relay's benchmarks, for the relay and for `flush`: a GPT of plain modules, without dropout.

Weights depend only on a seed and the layer, data only on the number of the microbatch, so that all contenders train
alike, and losses can be compared to the last bit.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.backend.streams import streams_of
from megatron.pipeline.program.lane_order import DEVICE, Residency
from megatron.pipeline.runtime.contract.tensors import TensorSpec
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.relay.host_store import FlatLayout, HostStore, to_host_memory
from megatron.pipeline.runtime.stages.module.rank_update import ModuleRelayUpdate
from megatron.pipeline.runtime.stages.module.stage import ModuleStage
from megatron.pipeline.runtime.stages.module.update import ModuleUpdate
from megatron.pipeline.runtime.update.versions import WeightVersions
from megatron.pipeline.schedules import Schedule

LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.01
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of the model and of a microbatch, which joins the data of `drawn_together` ordinary microbatches."""

    layers: int
    hidden: int
    heads: int = 4
    sequence: int = 64
    microbatch_size: int = 2
    drawn_together: int = 1
    vocabulary: int = 256

    @property
    def boundary_bytes(self) -> int:
        """The bytes of a microbatch's output of a layer, FP32 [microbatch_size, sequence, hidden]."""
        return 4 * self.microbatch_size * self.sequence * self.hidden

    @property
    def layer_parameters(self) -> int:
        """The number of a layer's parameters: 12 h^2 of the four matrices, and the biases and norms."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def num_parameters(self) -> int:
        ends = (2 * self.vocabulary + self.sequence) * self.hidden + 2 * self.hidden
        return self.layers * self.layer_parameters + ends

    @property
    def tokens_per_microbatch(self) -> int:
        return self.microbatch_size * self.sequence

    def recomputed(self, wrap: Callable[[nn.Module], nn.Module] = lambda unit: unit) -> nn.Module:
        return Recomputed(*(wrap(stage_module(self, index)) for index in range(self.layers)))

    def loss(self, module: nn.Module, microbatch: int) -> Tensor:
        tokens, labels = tokens_of(self, microbatch)
        return loss_of(module(tokens), labels)

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return make_optimizer(module.parameters())


class Layer(nn.Module):
    """A pre-norm transformer layer for tensors [microbatch_size, sequence, hidden]."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._heads = model.heads
        self.norm = nn.LayerNorm(model.hidden)
        self.query_key_value = nn.Linear(model.hidden, 3 * model.hidden)
        self.projection = nn.Linear(model.hidden, model.hidden)
        self.mlp_norm = nn.LayerNorm(model.hidden)
        self.up = nn.Linear(model.hidden, 4 * model.hidden)
        self.down = nn.Linear(4 * model.hidden, model.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        size, length, width = hidden.shape
        mixed = self.query_key_value(self.norm(hidden)).view(size, length, 3, self._heads, width // self._heads)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).reshape(size, length, width))
        return hidden + self.down(F.gelu(self.up(self.mlp_norm(hidden))))


class Embedding(nn.Module):
    """The embedding of tokens and of positions."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.word = nn.Embedding(model.vocabulary, model.hidden)
        self.position = nn.Parameter(0.02 * torch.randn(model.sequence, model.hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.word(tokens) + self.position


class Head(nn.Module):
    """The final norm and the output layer, which makes logits."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(model.hidden)
        self.output = nn.Linear(model.hidden, model.vocabulary, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output(self.norm(hidden))


def stage_module(model: Model, index: int, *, on_host: bool = False) -> nn.Module:
    """Make layer `index`, with the embedding before the first layer and the head after the last; names are unique.

    `on_host`: whether the initial weights are put into the host's memory, so that private memory never holds the
    weights of two stages.
    """
    torch.manual_seed(1234 + index)
    made = nn.Sequential()
    if index == 0:
        made.add_module("embedding", Embedding(model))
    made.add_module(f"layer{index}", Layer(model))
    if index == model.layers - 1:
        made.add_module("head", Head(model))
    if on_host:
        to_host_memory(made)
    return made


def tokens_of(model: Model, microbatch: int) -> tuple[Tensor, Tensor]:
    """The tokens of a microbatch and their successors, int64 tensors [microbatch_size, sequence]."""
    parts, shape = model.drawn_together, (model.microbatch_size // model.drawn_together, model.sequence + 1)
    generators = (torch.Generator().manual_seed(1000 + microbatch * parts + part) for part in range(parts))
    tokens = torch.cat([torch.randint(model.vocabulary, shape, generator=each) for each in generators])
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss over the tokens."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_optimizer(parameters) -> torch.optim.Optimizer:
    """Make the optimizer, with the same kernel for all contenders."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)


class Training:
    """A contender: `run(m)` trains a batch and returns its loss, `close()` ends it.

    Attributes:
        device_state_bytes: bytes that are always on the device.
        num_bytes_moved: bytes moved between host and device so far.
        num_batches: number of batches trained so far.
    """

    num_bytes_moved = 0

    def __init__(self, engine: PipelineEngine, model: Model) -> None:
        self._engine, self._model = engine, model
        self.num_batches = 0

    def run(self, num_microbatches: int) -> float:
        reports = self._engine.run_batch(num_microbatches, num_microbatches * self._model.microbatch_size)
        reports += self._engine.drain()
        self.num_batches += 1
        return reports[-1].losses["loss"]

    def close(self) -> None:
        self._engine.close()


class Flush(Training):
    """The contender with all state on the device, and layers recomputed from their inputs, as with
    `--recompute-granularity full`."""

    def __init__(self, model: Model) -> None:
        module = model.recomputed()
        parameters = dict(module.named_parameters())
        schedule = Schedule.preset("flush", num_stages=1)
        versions = WeightVersions(parameters, window=1)
        update = ModuleUpdate(
            parameters, versions=versions, optimizer=make_optimizer(parameters.values()), num_grad_buffers=1
        )
        stage = _stage(model, module, 0, 1, versions, False)
        super().__init__(PipelineEngine(schedule, stage, update), model)

    @property
    def device_state_bytes(self) -> int:
        """The bytes of weights, gradients and two moments."""
        return 4 * 4 * self._model.num_parameters


class Relay(Training):
    """The relay, with weights, gradients and moments in host memory, which on a CPU is a shared mapping."""

    def __init__(self, model: Model, *, update: str, resident: int = 2, stash: str = DEVICE) -> None:
        schedule = Schedule.preset(
            "l2l",
            num_stages=model.layers,
            num_virtual_stages=model.layers,
            residency=Residency(resident, update, stash),
        )
        modules = {index: stage_module(model, index, on_host=True) for index in range(model.layers)}
        self.store = HostStore({index: dict(module.named_parameters()) for index, module in modules.items()})
        optimizer = make_optimizer(self.store.parameters.values())
        self.moments = moments_on_host(optimizer, self.store)
        self.update = ModuleRelayUpdate(modules, self.store, residency=schedule.residency, optimizer=optimizer)
        stages = [
            _stage(model, module, index, model.layers, self.update.weights.of_stage(index), schedule.recomputes(index))
            for index, module in modules.items()
        ]
        gc.collect()
        super().__init__(PipelineEngine(schedule, stages, self.update), model)

    @property
    def device_state_bytes(self) -> int:
        """The bytes of the arena of weights and of two gradient buffers."""
        return self.update.weights.num_bytes + self.update.gradients.num_bytes

    @property
    def num_bytes_moved(self) -> int:
        return bytes_moved(self.update, self.num_batches)

    @property
    def host_bytes(self) -> int:
        """The bytes of weights, gradients and moments."""
        return self.store.num_bytes + self.moments


def bytes_moved(update: ModuleRelayUpdate, num_batches: int) -> int:
    """The bytes of fetched weights, and of each stage's gradients, stored once in each batch."""
    gradients = sum(stage.gradient_layout.num_bytes for stage in update.store.stages.values())
    return update.weights.num_bytes_fetched + num_batches * gradients


def moments_on_host(optimizer: torch.optim.Optimizer, store: HostStore) -> int:
    """Create AdamW's initial state in the host's memory, flat for each stage. Returns its bytes.

    Otherwise AdamW would create it at its first step, with the step counters in private memory.
    """
    num_bytes = 0
    for place in store.stages.values():
        parameters = {name: store.parameters[name] for name in place.weights}
        layout = FlatLayout(parameters)
        averages, squares = (layout.views(layout.allocate(streams_of(_CPU).host_buffer)) for _ in range(2))
        steps = streams_of(_CPU).host_buffer((len(parameters),), torch.float32)
        num_bytes += 2 * layout.num_bytes + steps.nbytes
        for (name, parameter), step in zip(parameters.items(), steps, strict=True):
            optimizer.state[parameter] = {"step": step, "exp_avg": averages[name], "exp_avg_sq": squares[name]}
    return num_bytes


class Recomputed(nn.Sequential):
    """Layers of which autograd saves only the inputs; backwards recompute the rest."""

    def forward(self, hidden: Tensor) -> Tensor:
        for module in self:
            hidden = checkpoint(module, hidden, use_reentrant=False, preserve_rng_state=False)
        return hidden


def _stage(model: Model, module: nn.Module, index: int, count: int, versions, recompute: bool) -> ModuleStage:
    spec = TensorSpec((model.microbatch_size, model.sequence, model.hidden))
    is_first, is_last = index == 0, index == count - 1
    return ModuleStage(
        module,
        index=index,
        num_stages=count,
        versions=versions,
        source=(lambda microbatch: tokens_of(model, microbatch.index)[0]) if is_first else None,
        loss=(lambda logits, microbatch: loss_of(logits, tokens_of(model, microbatch.index)[1])) if is_last else None,
        input_spec=None if is_first else spec,
        output_spec=None if is_last else spec,
        recompute=recompute,
    )
