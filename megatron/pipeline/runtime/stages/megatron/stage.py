"""A pipeline stage over a model chunk of megatron.core and Megatron's `forward_step`.

`forward_step(data_iterator, model)` returns `(output_tensor, loss_func)`. The module `losses` describes the result of
`loss_func` on the last stage. `forward_step` decides whether the stage reads the data iterator. While `forward_step`
runs, `parallel_state` gives the stage as the rank of the pipeline.

As in megatron.core, the storage of an output is freed as soon as the send has read it, and only its graph stays. The
backward is started in autograd's C++ engine, which does not check the shape of the freed output as
`torch.autograd.backward` does.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron import backend
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel.schedules import custom_backward, deallocate_output_tensor
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from megatron.pipeline.program.copies import Share
from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory, CapturingStage
from megatron.pipeline.runtime.activations.weight_products import DeferredProducts
from megatron.pipeline.runtime.contract.stage import EVALUATION_BATCH, Eviction, Microbatch
from megatron.pipeline.runtime.contract.tensors import TensorSpec
from megatron.pipeline.runtime.stages.megatron.auxiliary import (
    ROUTER_LOSSES,
    MultiTokenLosses,
    RouterLosses,
    stage_of_layers,
)
from megatron.pipeline.runtime.stages.megatron.data_and_dropout import DrawnData, Recorder, SeededDropout
from megatron.pipeline.runtime.stages.megatron.engine_linears import EngineLinears
from megatron.pipeline.runtime.stages.megatron.frozen_update import MegatronFrozenUpdate
from megatron.pipeline.runtime.stages.megatron.losses import StageLosses
from megatron.pipeline.runtime.stages.megatron.pipeline_position import at_stage, without_first_layers
from megatron.pipeline.runtime.stages.megatron.relay_update import MegatronRelayUpdate
from megatron.pipeline.runtime.stages.megatron.split_linears import (
    putting_off,
    require_splits,
    weights_of_both_ends,
)
from megatron.pipeline.runtime.stages.megatron.update import MegatronWeightUpdate

ForwardStep = Callable[[Iterator | None, torch.nn.Module], tuple[Tensor, Callable[[Tensor], tuple]]]

_HELD_BY_AUTOGRAD = frozenset({"layernorm", "mla_up_proj", "moe_act"})
"""The modules that megatron.core recomputes by `CheckpointWithoutOutput`."""


@dataclass
class _SavedMicrobatch:
    """The data saved between the forward and the backward of a microbatch."""

    input: Tensor | None
    output: Tensor | None = None  # with its graph; on the last stage the loss
    kept_input: Any = None  # the input as `CapturedActivations` keeps it for a recompute
    data: list[Any] | None = None  # the items that the forward read from the data iterator, for a recompute

    def recorder(self, source: Iterator | None) -> Iterator | None:
        """An iterator over `source` that records the items in `data`."""
        if source is None:
            return None
        self.data = []
        return Recorder(source, self.data)

    def replay(self) -> Iterator | None:
        """An iterator over the recorded items."""
        return None if self.data is None else iter(self.data)


class OutputCache(Protocol):
    """A cache of the outputs of a frozen first stage."""

    def read(self, batch: dict[str, Tensor]) -> Tensor | None:
        """The cached output for `batch`, an item of the data iterator: [sequence, microbatch, hidden], or None."""

    def read_older(self, batch: dict[str, Tensor]) -> tuple[Tensor, int] | None:
        """The cached output of the stage's first layers for `batch`, and the number of these layers; or None."""

    def write(self, batch: dict[str, Tensor], output: Tensor) -> None: ...

    def read_ahead(self, data: Iterator) -> None:
        """Begin to read the cached outputs for the next items of `data`."""


class MegatronStage(CapturingStage):
    """`Stage` over a DDP-wrapped model chunk.

    Args:
        model: the chunk, wrapped in megatron.core's DDP.
        forward_step: see the docstring of the module.
        update: the weight update of the rank, which has weight versions and loss scales; a frozen stage does not use
            it.
        seq_length, micro_batch_size: the same for all microbatches. Tensors between stages are [sequence, microbatch,
            hidden]; under sequence parallelism the sequence is divided by the number of tensor ranks, and under context
            parallelism by the number of ranks that share it.
        index, num_stages: the stage and the number of stages; default: rank and size of megatron.core's pipeline.
        data_iterator: the training data; None if this rank reads none. It yields microbatches in ascending order. If a
            program computes microbatches in another order, it must yield one item per microbatch. A copy's iterators
            yield the microbatches that it takes.
        evaluation_iterator: the data of an evaluation; None if this rank reads none.
        recompute: the schedule recomputes, so forwards save only their input and data and no graph.
        keeps: the positions in a batch of the microbatches whose forwards save a graph nevertheless.
        share: the stage's share of a batch where it is one of several copies. The microbatches of a batch are then
            those of all replicas in the order of the data. None: a replica has batches of its own.
        seed: the seed of the run, for dropout; None: dropout is not seeded, and no forward can be recomputed.
        is_at_own_place: `parallel_state` gives the stage already; else the stage sets it by `at_stage`.
        loss_names: the names of the numbers to report, the same on all ranks.
        activation_memory: counts and moves the activations of the rank; None: activations stay in the graph.
        first_trained: the first stage that is not frozen. A frozen stage runs only `forward_only`, also in training
            batches. The stage `first_trained` returns no gradient of its input.

    Attributes:
        data_iterator, evaluation_iterator: may be replaced between batches.
        output_cache: the cached outputs of the first stage, if it is frozen; None: no cache.

    Raises:
        ValueError: activations are counted and moved, but megatron.core recomputes some of them in a way in which they
            cannot be freed.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        forward_step: ForwardStep,
        update: MegatronWeightUpdate | MegatronRelayUpdate | MegatronFrozenUpdate,
        *,
        seq_length: int,
        micro_batch_size: int,
        index: int | None = None,
        num_stages: int | None = None,
        data_iterator: Iterator | None = None,
        evaluation_iterator: Iterator | None = None,
        recompute: bool = False,
        seed: int | None = 1234,
        is_at_own_place: bool = False,
        loss_names: tuple[str, ...] = ("lm loss",),
        activation_memory: ActivationMemory | None = None,
        first_trained: int = 0,
        keeps: frozenset[int] = frozenset(),
        share: Share | None = None,
    ) -> None:
        self.model = model
        self.index = parallel_state.get_pipeline_model_parallel_rank() if index is None else index
        self.num_stages = parallel_state.get_pipeline_model_parallel_world_size() if num_stages is None else num_stages
        self.loss_names = loss_names
        self.data_iterator = data_iterator
        self.evaluation_iterator = evaluation_iterator
        self.output_cache: OutputCache | None = None
        self._config = get_model_config(model)
        self._forward_step = forward_step
        self._set_input_tensor = get_attr_wrapped_model(model, "set_input_tensor")
        self._update = update
        self.is_frozen = self.index < first_trained
        self._returns_gradient = self.index > first_trained
        self._versions = None if self.is_frozen else update.versions_of(self.index)
        self._recompute, self._keeps = recompute, keeps
        assert seed is not None or not recompute, "a recomputed forward draws the same random numbers by the seed"
        self._seeded = SeededDropout(model, seed=seed).microbatch if seed is not None else nullcontext
        self._autocast: Callable[[], AbstractContextManager] = nullcontext
        if self._config.enable_autocast:
            self._autocast = partial(torch.autocast, backend.device().type, dtype=self._config.autocast_dtype)
        self._place = nullcontext if is_at_own_place else partial(at_stage, self.index, self.num_stages)
        self._micro_batch_size = micro_batch_size
        self.take_from_now(share)
        self._is_last = self.index == self.num_stages - 1
        self.input_spec = None if self.index == 0 else self._edge(self.index - 1, seq_length, micro_batch_size)
        self.output_spec = None if self._is_last else self._edge(self.index, seq_length, micro_batch_size)
        self.activations: dict[int, _SavedMicrobatch] = {}
        self._products = DeferredProducts()
        self._not_put_off = weights_of_both_ends(model)
        # weights in FP8 that are kept, and lie in the graph, would be taken for activations
        self._engine_linears = EngineLinears(model, keeps_casts=bool(self._config.fp8) and activation_memory is None)
        self._require_freeable(None if self.is_frozen else activation_memory)
        self._capture(model, None if self.is_frozen else activation_memory)
        self._losses = StageLosses(self._config, loss_names)
        self._router_tokens = update.router_tokens
        self._router_losses = RouterLosses(model, takes=not {*ROUTER_LOSSES.values()}.isdisjoint(loss_names))
        self._multi_token_losses = MultiTokenLosses(model, self._config)

    def _require_freeable(self, memory: ActivationMemory | None) -> None:
        if memory is not None and self._config.recompute_granularity == "selective":
            held = _HELD_BY_AUTOGRAD.intersection(self._config.recompute_modules)
            if held:
                raise ValueError(
                    f"--recompute-modules {' '.join(sorted(held))}: megatron.core lets autograd hold their inputs as "
                    "leaves, which cannot be freed, so activations can be neither moved nor counted: recompute "
                    "core_attn, or neither balance nor count activations."
                )

    def _edge(self, source: int, seq_length: int, micro_batch_size: int) -> TensorSpec:
        """The tensor that stage `source` sends. The outputs of layers of multi-token prediction come after its own."""
        config = self._config
        parts = parallel_state.get_tensor_model_parallel_world_size() if config.sequence_parallel else 1
        parts *= parallel_state.get_context_parallel_world_size()
        dtype = torch.float32 if config.fp32_residual_connection else config.pipeline_dtype or config.params_dtype
        outputs = 1 + (config.mtp_num_layers if stage_of_layers(config, self.num_stages) == source else 0)
        return TensorSpec((outputs * (seq_length // parts), micro_batch_size, config.hidden_size), dtype)

    def recompute_from_now(self, recompute: bool, *, keeps: frozenset[int]) -> None:
        """Set `recompute` and `keeps` (see the class) for another program.

        Precondition: the pipeline is drained, and the stage has a seed.
        """
        assert not self.activations
        self._recompute, self._keeps = recompute, keeps

    def take_from_now(self, share: Share | None, *, replica: int = 0, num_replicas: int = 1) -> None:
        """Let the program change to or from one in which the stage is a copy (see the class).

        Precondition: the pipeline is drained. The data iterators have to be replaced.

        `replica`, `num_replicas`: of a copy whose microbatches each stand for one of several replicas, that of this
        rank.
        """
        self._drawn = DrawnData(share)
        if share is None:
            num_replicas = parallel_state.get_data_parallel_world_size()
            replica = parallel_state.get_data_parallel_rank()
        self._samples_per_microbatch = self._micro_batch_size * num_replicas
        self._first_sample = self._micro_batch_size * replica

    def load_version(self, version: int) -> None:
        """Show weight `version` in the parameters."""
        self._versions.load(version)
        if self._router_tokens is not None:
            self._router_tokens.load(version)

    def forward(self, microbatch: Microbatch, input: Tensor | None) -> Tensor | None:
        """Run the forward of a microbatch. Return the detached output.

        The last stage records the loss and returns None.
        """
        self._set_training(True)
        self._count_tokens(microbatch)
        self._engine_linears.begin_forward(microbatch.batch)
        saved = self.activations[microbatch.index] = _SavedMicrobatch(input)
        data = self._drawn.of(microbatch.index, self.data_iterator, first=microbatch.index - microbatch.position)
        again = self._recompute and microbatch.position not in self._keeps
        with self._captured.capture(microbatch.index):
            if again:
                with torch.no_grad():
                    # megatron.core adds biases and dropout under enable_grad; detached, the output drops their graph.
                    output = self._run(microbatch, saved, saved.recorder(data), record=True).detach()
                saved.kept_input = self._captured.keep(microbatch.index, saved.input)
            else:
                self._require_input_grad(saved)
                output = saved.output = self._run(microbatch, saved, data, record=True)
                self._losses.record(microbatch, self._router_losses.take())
        may_move = not (again and self._keeps)
        self._captured.seal(microbatch.index, input=saved.input, output=output, may_move=may_move)
        return None if self._is_last else output.detach()

    def recompute(self, microbatch: Microbatch) -> None:
        """Run the forward again from the saved input and data, with the weights that are shown, and build the graph."""
        saved = self.activations[microbatch.index]
        self._count_tokens(microbatch)
        self._engine_linears.show_batch(microbatch.batch)
        saved.input = self._captured.kept(saved.kept_input)
        self._require_input_grad(saved)
        saved.output = self._run(microbatch, saved, saved.replay(), record=False)
        self._losses.record(microbatch, self._router_losses.take())
        self.free_output(microbatch)

    def backward(self, microbatch: Microbatch, output_grad: Tensor | None) -> Tensor | None:
        """Run the backward of a microbatch, which adds to the shown gradient buffer. Return the input's gradient.

        None on the first stage and on the stage `first_trained`.
        """
        with self._engine_linears.at_once():
            return self._backward(microbatch, output_grad)

    def _backward(self, microbatch: Microbatch, output_grad: Tensor | None) -> Tensor | None:
        saved = self.activations.pop(microbatch.index)
        assert saved.output is not None, f"backward of microbatch {microbatch.index} without its graph"
        scale = self._update.loss_scale(microbatch.batch)
        self._count_tokens(microbatch)
        self._engine_linears.show_batch(microbatch.batch)  # for layers that megatron.core recomputes
        self._router_losses.scale(scale / self._losses.parts(microbatch))
        self._multi_token_losses.scale(scale / self._losses.parts(microbatch))
        with self._seeded(self._sample(microbatch)):
            if self._is_last:
                torch.autograd.backward(saved.output, grad_tensors=torch.full_like(saved.output, scale))
            else:
                deallocate_output_tensor(saved.output, deallocate_pipeline_outputs=True)
                custom_backward(saved.output, output_grad)
        if self._config.recompute_granularity is not None:  # layers that are recomputed have their losses now
            self._losses.record(microbatch, self._router_losses.take())
        self._captured.drop(microbatch.index)
        self._engine_linears.end_backward(microbatch.batch)
        return saved.input.grad if saved.input is not None and self._returns_gradient else None

    def begin_trial(self) -> None:
        """Keep the data that forwards read from now on."""
        self._drawn.keep()

    def end_trial(self) -> None:
        """Drop the kept data."""
        self._drawn.forget()

    def begin_again(self, microbatches: Sequence[Microbatch]) -> None:
        """Drop all results of these microbatches' forwards. Their next forwards read the same data again."""
        for microbatch in microbatches:
            del self.activations[microbatch.index]
            self._captured.drop(microbatch.index)
            self._losses.drop(microbatch.batch)
            self._engine_linears.drop(microbatch.batch)
        self._drawn.give_again()

    def abandon(self) -> None:
        """Drop everything saved for batches in flight. The data iterators have to be replaced."""
        self.activations.clear()
        self._captured.clear()
        self._losses.clear()
        self._engine_linears.clear()
        self._router_losses.take()  # of a forward that a loss has interrupted
        self._multi_token_losses.take()
        self._products = DeferredProducts()

    def split_backward(self) -> None:
        """Prepare for backwards in two halves.

        Raises:
            ValueError: the model's backwards cannot be split.
        """
        require_splits(self.model, self._config)

    def backward_input(self, microbatch: Microbatch, output_grad: Tensor | None) -> Tensor | None:
        """Run `backward` without the weight products of linear layers, which `backward_weights` computes."""
        products = self._products.begin(microbatch.index)
        with putting_off(products, but=self._not_put_off), self._engine_linears.putting_off(products):
            return self._backward(microbatch, output_grad)

    def backward_weights(self, microbatch: Microbatch) -> None:
        """Add the weight products of the microbatch to the shown gradient buffer."""
        self._products.compute(microbatch.index)

    def deferred_bytes(self, microbatch: Microbatch) -> int:
        """The bytes saved for the weight products of the microbatch."""
        return self._products.num_bytes(microbatch.index)

    def free_output(self, microbatch: Microbatch) -> None:
        """Free the storage of the output and keep its graph."""
        saved = self.activations.get(microbatch.index)
        if saved is not None and saved.output is not None and not self._is_last:
            deallocate_output_tensor(saved.output, deallocate_pipeline_outputs=True)

    def evict(self, microbatch: Microbatch) -> Eviction:
        """Begin to move the saved activations of `microbatch` (see `CapturedActivations`)."""
        self.free_output(microbatch)
        return super().evict(microbatch)

    @torch.no_grad()
    def forward_only(self, microbatch: Microbatch, input: Tensor | None) -> Tensor | None:
        """Run a forward without dropout that saves nothing, for an evaluation or on a frozen stage.

        Returns the output; None on the last stage, which records the loss.
        """
        self._set_training(False)
        self._engine_linears.show_batch(None)
        is_evaluation = microbatch.batch == EVALUATION_BATCH
        if self.output_cache is not None and not is_evaluation:
            return self._from_cache(microbatch)
        data = self.evaluation_iterator if is_evaluation else self.data_iterator
        output = self._run(microbatch, _SavedMicrobatch(input), data, record=True)
        return None if self._is_last else output

    def _from_cache(self, microbatch: Microbatch) -> Tensor:
        """Read the output of the frozen first stage from the cache, or compute it and write it to the cache."""
        batch = next(self.data_iterator)
        output = self.output_cache.read(batch)
        if output is None:
            older = self.output_cache.read_older(batch)
            hidden, num_layers = older or (None, 0)
            with without_first_layers(self.model, num_layers) if older else nullcontext():
                output = self._run(microbatch, _SavedMicrobatch(hidden), iter([batch]), record=True)
            self.output_cache.write(batch, output)
        self.output_cache.read_ahead(self.data_iterator)
        return output

    def take_losses(self, batch: int) -> dict[str, tuple[float, float]]:
        """Remove and return the sums of the reported numbers of a batch: name -> (sum, count).

        Tensor rank 0 of the last stage reports the numbers of the loss function, and every stage its routers' losses.
        """
        return self._losses.take(batch)

    def _sample(self, microbatch: Microbatch) -> int:
        """The index over the whole run of the first sample of a microbatch."""
        return microbatch.index * self._samples_per_microbatch + self._first_sample

    def _set_training(self, training: bool) -> None:
        if self.model.training is not training:
            self.model.train(training)

    def _count_tokens(self, microbatch: Microbatch) -> None:
        """Make routers count for the microbatch's batch; layers that megatron.core recomputes count in the backward."""
        if self._router_tokens is not None:
            self._router_tokens.show_batch(microbatch.batch)

    def _require_input_grad(self, saved: _SavedMicrobatch) -> None:
        """Require a gradient of the input if it is returned, or if megatron.core recomputes whole layers.

        Its full recompute gives the weights no gradients if no input requires a gradient.
        """
        if saved.input is not None:
            wanted = self._returns_gradient or self._config.recompute_granularity == "full"
            saved.input = saved.input.detach().requires_grad_(wanted)

    def _run(self, microbatch: Microbatch, saved: _SavedMicrobatch, data: Iterator | None, *, record: bool) -> Tensor:
        """Run the forward of the chunk. Return its output, on the last stage the loss to differentiate."""
        self._set_input_tensor(saved.input)
        with self._place():
            with self._seeded(self._sample(microbatch)), self._autocast():
                output, loss_function = self._forward_step(data, self.model)
            self._set_input_tensor(None)  # else the chunk would keep the input alive after the backward
            if (further := self._multi_token_losses.take()) and record:
                self._losses.record(microbatch, further)
            if not self._is_last:
                return output
            return self._losses.to_differentiate(microbatch, loss_function(output), record=record)
