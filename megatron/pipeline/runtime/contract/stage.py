"""The interfaces through which the executor calls a stage and its weight update.

A schedule must not know what it drives: a megatron.core chunk, any ``nn.Module`` or a stage that only sleeps. So the
executor uses two small protocols. A `Stage` computes: forward, recompute, and backward (whole, or in two halves where
it is a `SplittingStage`). It also loads a weight version into its parameters. A `WeightUpdate` leads from a batch's
last backward to the next weights: the reductions, which run on a background thread, and the optimizer step.

Order of the calls on one rank, for one batch::

    begin_batch(info)        before the batch's first forward: choose its loss scale
    begin_backward(info)     before its first backward, whole or half: choose its gradient buffer
    resume_backward(info)    before a later backward that follows a backward of another batch: select that buffer again
    reduce_grad(version, s)  chain thread, after its last backward   (only if data parallel)
    reduce_embed(version)    chain thread                            (only tied embeddings, where the first and the last
                             stage are on two ranks; on one rank reduce_norm adds up their gradients first)
    reduce_norm(version, ..) chain thread
    step(version)            main thread, after the reductions posted before it: makes `version` = batch + 1

Where the weights are predicted, these calls come between the batch's backwards and its reductions::

    hold(version, n)             main thread, after n backwards of the batch: keep a copy of their gradients
    hold_embed(version, n)       main thread: keep a copy of the gradients of tied embeddings, where their two stages
                                 are on two ranks
    reduce_partial(version)      chain thread, after `hold`         (only if predictions read the sum over replicas)
    reduce_partial_embed(version)    chain thread, after `hold_embed`
    predict(version, n)          main thread, after the reductions posted for it, and after step(version - 1): makes the
                                 weights that the next batch uses, from the kept copy, else from n finished backwards

Where weights live on the host, weights and gradients move stage by stage. The executor makes these calls when it
reaches the instruction in the row. Each but `accumulate` returns the function that the instruction's lane then runs::

    fetch(stage, version)       before the stage's forwards, and again before its backwards
    free(stage)                 after them: from the call on, nothing uses the weights
    accumulate(stage)           no instruction: before each of its backwards, whole or half
    store_grad(stage, version)  after its last backward, and after reduce_grad(version, stage) where the row has one
    update(stage, version)      after step(version), or after store_grad where updates are eager

Under the weight policy ``stash``, ``reduce_norm`` comes after ``step`` and only completes the report.

Where steps are optimistic, ``reduce_norm`` comes after ``step``, too. The next batch begins, and then come::

    validate(version)        main thread, after reduce_norm(version): returns whether the step was right
    roll_back(version)       if it was wrong, on all ranks: undo it and take the right step; begin_batch is then called
                             again

A method that a class inherits from one of the protocols does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.runtime.contract.tensors import TensorSpec

if TYPE_CHECKING:
    from megatron.pipeline.runtime.contract.tensors import EdgeTensors

EVALUATION_BATCH = -1
"""Batch number of an evaluation's microbatches: ``take_losses(EVALUATION_BATCH)`` returns their loss sums."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One microbatch. `index` counts over the whole run; `position` counts from 0 inside its batch.

    Where stages are copies, a batch has the microbatches of all replicas, and a stage takes some of them.
    """

    index: int
    batch: int
    position: int
    num_microbatches: int


@dataclass(frozen=True)
class BatchInfo:
    """One batch: its number in the run, its microbatches per pipeline, and its samples over all replicas.

    Where stages are copies, all replicas are one pipeline.
    """

    index: int
    num_microbatches: int
    num_samples: int


NUM_TOKENS = "number of tokens"
"""Key of the number of tokens in the result of `take_losses`. Gradients that are sums over tokens are divided by it."""


@dataclass
class BatchReport:
    """The result of one batch, equal on every rank of the job; only `learning_rate` may differ between ranks.

    `num_tokens`: the tokens with a loss, where gradients are sums over tokens; else 1.
    """

    batch: int
    losses: dict[str, float] = field(default_factory=dict)
    grad_norm: float | None = None
    overflow: bool = False
    skipped: bool = False
    loss_scale: float = 1.0
    num_tokens: float = 1.0
    learning_rate: float = 0.0
    num_samples: int = 0
    stop_requests: int = 0
    nan: bool = False
    layers_squared: tuple[float, ...] = ()
    """Squared gradient norm of each layer of the model, 0 for frozen layers; empty unless requested."""
    tokens_per_expert: tuple[tuple[int, ...], ...] = ()
    """Tokens of each expert over the batch, [layers][experts], 0 in layers without experts; empty if not counted."""
    rank_metrics: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Measurements that each rank takes of itself: name -> values in rank order."""

    @property
    def gradient_scale(self) -> float:
        """The reduced gradients divided by the gradients of the batch's loss."""
        return self.loss_scale * self.num_tokens

    @property
    def expert_load_imbalance(self) -> float | None:
        """The highest load of an expert divided by the mean load in its layer, over all layers; None without counts."""
        return max((max(row) * len(row) / sum(row) for row in self.tokens_per_expert if any(row)), default=None)

    @property
    def loss(self) -> float:
        """The mean loss, if the report has exactly one. Raises ValueError if it has several or none."""
        if len(self.losses) != 1:
            raise ValueError(f"batch {self.batch} has the losses {sorted(self.losses)}; ask `losses` for one of them")
        return next(iter(self.losses.values()))


@dataclass(frozen=True, slots=True)
class Eviction:
    """A microbatch whose saved activations leave their stage.

    Attributes:
        num_bytes: the size of the packed activations, equal for all microbatches of a stage.
        pack: copies the activations into a given buffer or a buffer of the rank's pool, uint8 [num_bytes], frees the
            activations and returns the buffer. Call it once, on any thread. Computations may run meanwhile.
        held: `pack` fills it with tensors from which the device may still copy. Drop the list to free them.
    """

    num_bytes: int
    pack: Callable[..., Tensor]
    held: list[Tensor] = field(default_factory=list)


class AnyStage(Protocol):
    """One stage of the model on this rank, in a chain or another graph.

    All calls come from the main thread, except `take_losses` and `Eviction.pack`.
    """

    index: int
    """The number of the stage in the model. Where stages of a program are copies, copies of one stage share it."""
    num_stages: int
    loss_names: tuple[str, ...]
    """Names of the losses, equal on every stage, so that ranks without losses can take part in the sum."""

    def recompute(self, microbatch: Microbatch) -> None:
        """Run the forward of `microbatch` again for its backward, from its saved input and with its random state."""

    def free_output(self, microbatch: Microbatch) -> None:
        """Drop the stage's reference to an output that is being sent. The channel keeps the storage until then."""

    def load_version(self, version: int) -> None:
        """Load weight `version` into the parameters. Called before every forward, recompute and backward."""

    def take_losses(self, batch: int) -> Mapping[str, tuple[float, float]]:
        """Remove and return the loss sums of `batch`: name -> (numerator, denominator), for the losses of this stage.

        Called on the chain thread while the main thread may run the next batch; for an evaluation on the main thread.
        """


def take_losses(stages: Iterable[AnyStage], batch: int) -> dict[str, tuple[float, float]]:
    """Remove and return the loss sums of `batch` over the stages of a rank: name -> (numerator, denominator)."""
    sums: dict[str, tuple[float, float]] = {}
    for stage in stages:
        for name, (numerator, denominator) in stage.take_losses(batch).items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + numerator, before[1] + denominator
    return sums


@runtime_checkable
class Stage(AnyStage, Protocol):
    """A stage of a chain."""

    input_spec: TensorSpec | None
    """The input of one microbatch; None on the first stage."""
    output_spec: TensorSpec | None
    """The output of one microbatch; None on the last stage."""

    def forward(self, microbatch: Microbatch, input: Tensor | None) -> Tensor | None:
        """Run the forward and save the tensors that the backward needs.

        Returns the output, contiguous and detached; None on the last stage.
        """

    def backward(self, microbatch: Microbatch, output_grad: Tensor | None) -> Tensor | None:
        """Accumulate weight gradients and drop the saved tensors.

        Returns the gradient of the input; None on the first stage.
        """

    def saved_bytes(self, microbatch: Microbatch) -> int:
        """Return the bytes saved for the backward of `microbatch` on this stage; 0 while they are evicted.

        `saved_bytes`, `evict` and `load` raise RuntimeError on a stage that was built without an `ActivationMemory`.
        """

    def evict(self, microbatch: Microbatch) -> Eviction:
        """Begin to move the saved activations of `microbatch`. Nothing may read them until `load` has ended."""

    def load(self, microbatch: Microbatch, buffer: Tensor) -> None:
        """Restore the packed activations from `buffer`. Nobody may write to `buffer` before the backward has ended."""

    def release_input(self, microbatch: Microbatch) -> Tensor:
        """Drop the saved input and return it, detached. Called between a forward and its recompute."""

    def restore_input(self, microbatch: Microbatch, input: Tensor) -> None:
        """Save `input` again, equal in values, shape and dtype to the released one. Called before the recompute."""

    def forward_only(self, microbatch: Microbatch, input: Tensor | None) -> Tensor | None:
        """Run a forward with the loaded weights and save nothing. For evaluation, and for frozen stages."""


class SplittingStage(Protocol):
    """A stage, in a chain or another graph, whose backward can be computed in two halves, I and W.

    The stage before waits for I; only the update waits for W. The stage chooses which weight gradients I computes and
    which W computes. After W all of them are added to the gradients of the microbatch's batch. Some microbatches may
    have a whole backward, and others I and then W.
    """

    def split_backward(self) -> None:
        """Prepare for split backwards. Called once, before the first row that splits one.

        If a microbatch's forward came before this call, its I may compute all gradients.
        """

    def backward_input(self, microbatch: Microbatch, output_grad: Any) -> Any:
        """As `backward`, but leave weight gradients to `backward_weights`. Keep only the tensors that these need."""

    def backward_weights(self, microbatch: Microbatch) -> None:
        """Accumulate the weight gradients that `backward_input` left out, and drop the tensors saved for them."""

    def deferred_bytes(self, microbatch: Microbatch) -> int:
        """Return the bytes saved for the W of `microbatch`: 0 before its I and after its W."""


@runtime_checkable
class GraphStage(AnyStage, Protocol):
    """A stage of a graph: it exchanges several tensors with each stage to which it has an edge.

    Its activations are never moved to another rank. Tensors of floating or complex dtype have gradients, which are in
    the order of these tensors. The gradient of a shared parameter, received or returned, is None except with the last
    microbatch of a batch.
    """

    edges: Mapping[int, EdgeTensors]
    """Other stage -> the tensors that the two exchange, in both directions; shapes may differ by microbatch."""

    def edges_at(self, microbatch: Microbatch) -> Mapping[int, EdgeTensors]:
        """`edges` with the shapes of a microbatch, which both ends of an edge know."""

    def forward(
        self, microbatch: Microbatch, inputs: Mapping[int, tuple[Tensor, ...]]
    ) -> Mapping[int, tuple[Tensor, ...]]:
        """Run the forward and save the tensors that the backward needs.

        `inputs`: stage -> its tensors. Returns stage -> tensors for it, detached.
        """

    def backward(
        self, microbatch: Microbatch, output_grads: Mapping[int, tuple[Tensor | None, ...]]
    ) -> Mapping[int, tuple[Tensor | None, ...]]:
        """Accumulate weight gradients. Return stage -> gradients of its tensors, for the stages that need them."""

    def load_ahead(self, version: int, horizon: int) -> None:
        """Load weight `version`, the newest, predicted `horizon` steps ahead. Called before a forward."""

    def load_provisional(self, version: int, unstepped: int) -> None:
        """Load the weights that a step from `version`, the newest, would give. Called before a forward.

        The step uses the gradients of `unstepped` microbatches, which no real step has used yet.
        """

    def forward_only(
        self, microbatch: Microbatch, inputs: Mapping[int, tuple[Tensor, ...]]
    ) -> Mapping[int, tuple[Tensor, ...]]: ...


class AnyUpdate(Protocol):
    """The path from a batch's gradients to the next weight version, one per rank."""

    def begin_batch(self, info: BatchInfo) -> None:
        """Prepare for the batch. Called before its first forward on this rank."""

    def reduce_norm(self, version: int, stop_requests: int, losses: Mapping[str, tuple[float, float]]) -> None:
        """Chain thread: reduce norm, overflow, loss sums and stop requests over the job in one float64 all-reduce.

        If both stages of tied embeddings are on this rank, first add up the gradients of these embeddings.
        """

    def step(self, version: int) -> BatchReport:
        """Make weight `version` from the gradients of batch ``version - 1``, and return the batch's report.

        Called after waiting for the chain; where stages step separately, after all have stepped. The report may be
        completed later, by a `reduce_norm` that the program places after the step.
        """

    def begin_evaluation(self) -> None:
        """Prepare for forwards with the newest weights. Called while the pipeline is drained."""

    def show_newest(self) -> None:
        """Load the newest weights into the parameters, for a checkpoint. Called while the pipeline is drained."""


@runtime_checkable
class WeightUpdate(AnyUpdate, Protocol):
    """The weight update of a rank whose stages step together."""

    def begin_backward(self, info: BatchInfo) -> None:
        """Take a gradient buffer for the batch. Called before its first backward on this rank."""

    def resume_backward(self, info: BatchInfo) -> None:
        """Select the batch's gradient buffer again.

        Called before a backward that follows a backward of another batch.
        """

    def reduce_grad(self, version: int, stage: int) -> None:
        """Chain thread: reduce the gradients that make `version` over the data-parallel replicas. Return when done.

        `stage`: the stage with these gradients. Where weights live on the device, the rank's lowest stage stands for
        all its stages.
        """

    def reduce_embed(self, version: int) -> None:
        """Chain thread: add up the gradients of the embedding that two stages share."""


@runtime_checkable
class OptimisticUpdate(WeightUpdate, Protocol):
    """A weight update that can step before the norm of all gradients is known."""

    def validate(self, version: int) -> bool:
        """Return whether the step to `version` was right, by the sums over the job; the same on all ranks."""

    def roll_back(self, version: int) -> None:
        """Undo the wrong step to `version`. Take the right step, or none if the batch must be skipped."""

    def give_up(self) -> None:
        """Free the memory for undoing steps: from now on every step comes after the reduction of its norm."""


class RepeatingStage(Protocol):
    """A stage that can begin a batch again, after forwards and before the first backward."""

    def begin_trial(self) -> None:
        """Keep the data that forwards read from now on. Called before the first forward of a batch."""

    def end_trial(self) -> None:
        """Drop the kept data: the batch will not begin again."""

    def begin_again(self, microbatches: Sequence[Microbatch]) -> None:
        """Drop all results of these microbatches' forwards. Their next forwards read the same data again."""


@runtime_checkable
class StagewiseUpdate(AnyUpdate, Protocol):
    """The weight update of a rank whose stages step separately."""

    def of_stage(self, stage: int) -> StageUpdate:
        """Return the update of one stage."""


class StageUpdate(Protocol):
    """The calls for a single stage in the weight update of a rank whose stages step separately."""

    def begin_forward(self, info: BatchInfo, version: int) -> None:
        """Prepare for the batch. Called before its first forward at the stage, with `version` loaded."""

    def begin_backward(self, info: BatchInfo) -> None: ...

    def resume_backward(self, info: BatchInfo) -> None: ...

    def step(self, version: int) -> BatchReport: ...


@runtime_checkable
class PredictingUpdate(WeightUpdate, Protocol):
    """A weight update that also predicts weights.

    When the backwards of n of m microbatches are done, the sum of their gradients times m/n stands for the gradients of
    the whole batch.

    `reads_gradients`: False if a prediction repeats the last update and reads no gradients.
    """

    reads_gradients: bool

    def step(self, version: int, *, with_prediction: bool = False) -> BatchReport:
        """As `AnyUpdate.step`.

        `with_prediction`: `predict` of the next version is the next call. Until then the optimizer's step may be put
        off, with its weights, state and gradients, to be taken in one pass with the prediction.
        """

    def hold(self, version: int, num_microbatches: int) -> None:
        """Keep a copy of the gradients of batch ``version - 1`` after `num_microbatches` of its backwards.

        Where stages are copies, which add up what they keep, these are the backwards of all copies of the stage.
        """

    def hold_embed(self, version: int, num_microbatches: int) -> None:
        """As `hold`, but only for the gradients of the embedding that two stages share."""

    def reduce_partial(self, version: int) -> None:
        """Chain thread: average the kept gradients over the data-parallel replicas."""

    def reduce_partial_embed(self, version: int) -> None:
        """Chain thread: add up the kept gradients of the tied embeddings."""

    def predict(self, version: int, num_microbatches: int) -> None:
        """Take the step that was put off, if any, and make the predicted weights of `version` from the kept gradients.

        Without kept gradients, use those of the batch's first `num_microbatches` microbatches. If the gradients are not
        finite, the prediction is a copy of the true weights. Without `reads_gradients` the prediction is the true
        weights with the last update added once more, or a copy of the true weights if the last step was skipped.
        """


@runtime_checkable
class RelayUpdate(WeightUpdate, Protocol):
    """A weight update on the host. The device has the weights of a few stages at a time.

    It ignores `begin_backward` and `resume_backward` and uses `accumulate` instead.

    Attributes:
        residency: residency of the schedule for which the update is made; None: any.
    """

    residency: Residency | None

    def fetch(self, stage: int, version: int) -> Callable[[], None]:
        """Prepare to copy `version` of the stage to the device. Return the function that copies it.

        The lane to the device calls the function.
        """

    def free(self, stage: int) -> Callable[[], None]:
        """Give up the stage's weights on the device. Return a function that frees their memory.

        The lane to the device calls it.
        """

    def accumulate(self, stage: int) -> None:
        """Select the stage's gradient buffer, a free one for a new batch. Called before each backward of the stage."""

    def store_grad(self, stage: int, version: int) -> Callable[[], None]:
        """Prepare to store the stage's gradients for `version`. Return the function that copies them to the host.

        The lane from the device calls the function. All backwards are done; the chain may still have to reduce the
        gradients.
        """

    def update(self, stage: int, version: int) -> Callable[[], None]:
        """Return the function that steps the stage to `version`. The lane of the host's optimizer calls it."""
