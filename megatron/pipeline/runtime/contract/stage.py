"""The interfaces through which the executor calls a stage and its weight update.

A schedule must not know what it drives: a megatron.core chunk, any ``nn.Module`` or a stage that only sleeps. So the
executor uses two small protocols. A `Stage` computes: forward, recompute, backward (whole, or in two halves where it
is a `SplittingStage`), and shows a weight version in its parameters. A `WeightUpdate` owns the way from a batch's last
backward to the next weights: the reductions, which run on a background thread, and the optimizer step.

Order of the calls on one rank, for one batch::

    begin_batch(info)        before the batch's first forward: choose its loss scale
    begin_backward(info)     before its first backward, whole or half: choose its gradient buffer
    resume_backward(info)    before any other that follows one of another batch: show that buffer again
    reduce_grad(version, s)  chain thread, after its last backward   (only if data parallel)
    reduce_embed(version)    chain thread                            (only tied embeddings, where the first and the last
                             stage are on two ranks; on one rank reduce_norm adds up their gradients first)
    reduce_norm(version, ..) chain thread
    step(version)            main thread, after what was posted before it: makes `version` = batch + 1

Where the weights are predicted, these calls come between the batch's backwards and its reductions::

    hold(version, n)             main thread, after n of its backwards: keep their gradients
    hold_embed(version, n)       main thread: the same of tied embeddings, where their stages are on two ranks
    reduce_partial(version)      chain thread, after `hold`         (only if predictions read the sum over replicas)
    reduce_partial_embed(version)    chain thread, after `hold_embed`
    predict(version, n)          main thread, after what was posted for it, and after step(version - 1): makes the
                                 weights that the next batch uses, from the n backwards that are done, or were kept

Where weights live on the host, weights and gradients move stage by stage. These are called where the row has reached
the word, and return the function that its lane then runs::

    fetch(stage, version)       before the stage's forwards, and again before its backwards
    free(stage)                 after them: from the call on, nothing uses the weights
    accumulate(stage)           no word: before each of its backwards, whole or half
    store_grad(stage, version)  after its last backward, and what reduce_grad(version, stage) posted before it
    update(stage, version)      after step(version), or where updates are eager after store_grad

Under the weight policy ``stash``, ``reduce_norm`` comes after ``step`` and only completes the report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.runtime.contract.tensors import TensorSpec

if TYPE_CHECKING:
    from megatron.pipeline.runtime.contract.tensors import EdgeTensors

EVALUATION_BATCH = -1
"""Batch number of the microbatches of an evaluation: ``take_losses(EVALUATION_BATCH)`` returns their sums."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One microbatch: `index` counts over the whole run, `position` from 0 inside its batch."""

    index: int
    batch: int
    position: int
    num_microbatches: int


@dataclass(frozen=True)
class BatchInfo:
    """One batch: `index` over the whole run, its microbatches per pipeline, its samples over all replicas."""

    index: int
    num_microbatches: int
    num_samples: int


@dataclass
class BatchReport:
    """The result of one batch; equal on every rank of the job except `learning_rate` where groups differ."""

    batch: int
    losses: dict[str, float] = field(default_factory=dict)
    grad_norm: float | None = None
    overflow: bool = False
    skipped: bool = False
    loss_scale: float = 1.0
    learning_rate: float = 0.0
    num_samples: int = 0
    stop_requests: int = 0
    nan: bool = False
    layers_squared: tuple[float, ...] = ()
    """The squared norm of the gradients of each layer of the model, where they are asked for; 0 of frozen ones."""
    rank_metrics: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """What each rank of the job measured of itself for this report: name -> values in rank order."""

    @property
    def loss(self) -> float:
        """The mean loss, where there is one. Raises ValueError where there are several or none."""
        if len(self.losses) != 1:
            raise ValueError(f"batch {self.batch} has the losses {sorted(self.losses)}; ask `losses` for one of them")
        return next(iter(self.losses.values()))


@dataclass(frozen=True, slots=True)
class Eviction:
    """A microbatch whose saved activations leave their stage. `pack`, called once, on any thread and beside other
    computations, copies them into a buffer of the rank's pool, uint8 [num_bytes], and frees them. All microbatches of a
    stage have one size. `held`: `pack` fills it with tensors from which the device may still copy; they are free once
    nobody holds the list.
    """

    num_bytes: int
    pack: Callable[[], Tensor]
    held: list[Tensor] = field(default_factory=list)


class AnyStage(Protocol):
    """One stage of the model on this rank, of a chain or of another graph. All calls come from the main thread, except
    `take_losses` and what `evict` returns.
    """

    index: int
    num_stages: int
    loss_names: tuple[str, ...]
    """Names of the losses, the same on every stage, so that ranks without losses can take part in their sum."""

    def recompute(self, microbatch: Microbatch) -> None:
        """Run the forward of `microbatch` again from its saved input, with its random state, for the backward."""

    def free_output(self, microbatch: Microbatch) -> None:
        """Drop the stage's reference to an output that is being sent; the channel keeps its storage until then."""

    def load_version(self, version: int) -> None:
        """Show weight `version` in the parameters; called before every forward, recompute and backward."""

    def take_losses(self, batch: int) -> Mapping[str, tuple[float, float]]:
        """Remove and return the loss sums of `batch`, name -> (numerator, denominator); {} but on the last stage.

        Called on the chain thread (main thread for an evaluation), while the main thread may run the next batch.
        """


@runtime_checkable
class Stage(AnyStage, Protocol):
    """A stage of a chain."""

    input_spec: TensorSpec | None
    """What arrives per microbatch; None on the first stage."""
    output_spec: TensorSpec | None
    """What leaves per microbatch; None on the last stage."""

    def forward(self, microbatch: Microbatch, input: Tensor | None) -> Tensor | None:
        """Forward with what backward needs saved. Returns the output, contiguous and detached (None on the last
        stage).
        """

    def backward(self, microbatch: Microbatch, output_grad: Tensor | None) -> Tensor | None:
        """Accumulate weight gradients; return the gradient of the input (None on the first stage); drop what was
        saved.
        """

    def saved_bytes(self, microbatch: Microbatch) -> int:
        """The bytes saved for the backward of `microbatch` on this stage; 0 while they are evicted.

        This, `evict` and `load` raise RuntimeError on a stage that was built without an `ActivationMemory`.
        """

    def evict(self, microbatch: Microbatch) -> Eviction:
        """Begin to move what is saved of `microbatch`: nothing may read it from now on, until `load` has ended."""

    def load(self, microbatch: Microbatch, buffer: Tensor) -> None:
        """Restore the packed activations from `buffer`, to which nobody may write before the backward has ended."""

    def release_input(self, microbatch: Microbatch) -> Tensor:
        """Give up the saved input, detached; called between a forward and its recompute."""

    def restore_input(self, microbatch: Microbatch, input: Tensor) -> None:
        """Save this input, with the same values, shape and dtype; called before the recompute."""

    def forward_only(self, microbatch: Microbatch, input: Tensor | None) -> Tensor | None:
        """Forward for evaluation with the shown weights; saves nothing."""


class SplittingStage(Protocol):
    """A stage, of a chain or of a graph, whose backward can be computed in two halves: I, for which the stage before
    waits, and W, for which only the update waits. The stage chooses which weight gradients I computes and which W
    computes; after W all of them are added to the gradients of the microbatch's batch. Some microbatches may have a
    whole backward, and others I and then W.
    """

    def split_backward(self) -> None:
        """Prepare for backwards in two halves; called once, before the first row that has one. If a microbatch's
        forward came before this call, its I may compute all gradients.
        """

    def backward_input(self, microbatch: Microbatch, output_grad: Any) -> Any:
        """As `backward`, but leave weight gradients to `backward_weights`; saves only what it needs."""

    def backward_weights(self, microbatch: Microbatch) -> None:
        """Accumulate the weight gradients that `backward_input` has left, and drop the tensors saved for them."""

    def deferred_bytes(self, microbatch: Microbatch) -> int:
        """The bytes saved of `microbatch` between its two halves; 0 before and after."""


@runtime_checkable
class GraphStage(AnyStage, Protocol):
    """A stage of a graph: it exchanges several tensors with each stage to which it has an edge. Its activations are
    never moved. Gradients belong to the tensors of floating dtype, in their order; the gradient of a shared parameter,
    in and out, is None except with the last microbatch of a batch.
    """

    edges: Mapping[int, EdgeTensors]
    """The other stage -> what travels between them, in both directions."""

    def forward(
        self, microbatch: Microbatch, inputs: Mapping[int, tuple[Tensor, ...]]
    ) -> Mapping[int, tuple[Tensor, ...]]:
        """Forward that saves what backward needs; stage -> tensors, in and out. The outputs are detached."""

    def backward(
        self, microbatch: Microbatch, output_grads: Mapping[int, tuple[Tensor | None, ...]]
    ) -> Mapping[int, tuple[Tensor | None, ...]]:
        """Accumulate weight gradients; return the gradients of the inputs, for the stages that need them."""

    def load_ahead(self, version: int, horizon: int) -> None:
        """Show weight `version`, the newest, predicted this many steps ahead; called before a forward."""

    def load_provisional(self, version: int, unstepped: int) -> None:
        """Show the weights that a step from `version`, the newest, would give, with the gradients of this many
        microbatches, which no step has taken yet; called before a forward.
        """

    def forward_only(
        self, microbatch: Microbatch, inputs: Mapping[int, tuple[Tensor, ...]]
    ) -> Mapping[int, tuple[Tensor, ...]]: ...


class AnyUpdate(Protocol):
    """The path from a batch's gradients to the next weight version, one per rank."""

    def begin_batch(self, info: BatchInfo) -> None:
        """Called before the first forward of the batch on this rank."""

    def reduce_norm(self, version: int, stop_requests: int, losses: Mapping[str, tuple[float, float]]) -> None:
        """Chain thread: one float64 all-reduce over the job of norm, overflow, loss sums and stop requests.

        Before it, the gradients of tied embeddings whose stages are both on this rank are added up.
        """

    def step(self, version: int) -> BatchReport:
        """Make weight `version` from the gradients of batch ``version - 1``; called after waiting for the chain, or
        where stages step separately, when all have.

        The report may be completed later, by a `reduce_norm` that the program places after the step.
        """

    def begin_evaluation(self) -> None:
        """Prepare for forwards with the newest weights; the pipeline is drained."""

    def show_newest(self) -> None:
        """Show the newest weights in the parameters, for a checkpoint; the pipeline is drained."""


@runtime_checkable
class WeightUpdate(AnyUpdate, Protocol):
    """The weight update of a rank whose stages step together."""

    def begin_backward(self, info: BatchInfo) -> None:
        """Called before the first backward of the batch on this rank: takes a gradient buffer for the batch."""

    def resume_backward(self, info: BatchInfo) -> None:
        """Called before a backward that follows one of another batch: gradients go to the batch's buffer again."""

    def reduce_grad(self, version: int, stage: int) -> None:
        """Chain thread: reduce the gradients that make `version` over the data-parallel replicas; return when done.

        `stage`: the one with these gradients. Where weights live on the device it is the rank's lowest stage, and
        stands for all of them.
        """

    def reduce_embed(self, version: int) -> None:
        """Chain thread: add up the gradients of the tied embeddings of the first and the last stage."""


@runtime_checkable
class StagewiseUpdate(AnyUpdate, Protocol):
    """The weight update of a rank whose stages step separately."""

    def of_stage(self, stage: int) -> StageUpdate:
        """The update of one stage."""


class StageUpdate(Protocol):
    """The calls for a single stage in the weight update of a rank whose stages step separately."""

    def begin_forward(self, info: BatchInfo, version: int) -> None:
        """Called before the batch's first forward at the stage; parameters show `version`."""

    def begin_backward(self, info: BatchInfo) -> None: ...

    def resume_backward(self, info: BatchInfo) -> None: ...

    def step(self, version: int) -> BatchReport: ...


@runtime_checkable
class PredictingUpdate(WeightUpdate, Protocol):
    """A weight update that also predicts. The sum of the gradients of the first n of m microbatches, whose backwards
    are done, times m/n stands for the gradients of the whole batch.
    """

    def hold(self, version: int, num_microbatches: int) -> None:
        """Keep a copy of the gradients of batch ``version - 1`` after this many of its backwards."""

    def hold_embed(self, version: int, num_microbatches: int) -> None:
        """Keep a copy of the gradients of the tied embeddings of the first and the last stage alone; see `hold`."""

    def reduce_partial(self, version: int) -> None:
        """Chain thread: average the kept gradients over the data-parallel replicas."""

    def reduce_partial_embed(self, version: int) -> None:
        """Chain thread: add up the kept gradients of the tied embeddings."""

    def predict(self, version: int, num_microbatches: int) -> None:
        """Make the predicted weights of `version` from the kept gradients, else from those of this many microbatches.

        They are a copy of the true weights where these gradients are not finite.
        """


@runtime_checkable
class RelayUpdate(WeightUpdate, Protocol):
    """A weight update on the host, which keeps the weights of a few stages on the device. It ignores `begin_backward`
    and `resume_backward` and uses `accumulate`. `residency`: that of the schedule for which it is made; None: any.
    """

    residency: Residency | None

    def fetch(self, stage: int, version: int) -> Callable[[], None]:
        """Bring `version` of the stage to the device. Returns the copy, to be called in the lane to the device."""

    def free(self, stage: int) -> Callable[[], None]:
        """Give up the stage's weights on the device. Returns the call for the lane to the device at which their memory
        becomes free.
        """

    def accumulate(self, stage: int) -> None:
        """Called before a backward of the stage: gradients go to its buffer, or to a free one for a new batch."""

    def store_grad(self, stage: int, version: int) -> Callable[[], None]:
        """Store the stage's gradients for `version`, which are complete, or will be when the chain has reduced them.
        Returns the copy to the host, to be called in the lane from the device.
        """

    def update(self, stage: int, version: int) -> Callable[[], None]:
        """Returns the step that makes `version` of the stage, to be called in the lane of the host's optimizer."""
