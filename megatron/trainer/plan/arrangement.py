"""How a job's ranks share a model: the ranks of a pipeline, the number of pipelines, the layers of each rank, and the
frozen layers.

A run begins in the arrangement that its flags give. Where the arrangement changes while the run trains, the run goes on
with the configuration of a run that began in the present one (`arranged`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from megatron.elastic.stages import Arrangement
from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.arguments.rules.schedule import settled_schedule
from megatron.trainer.models import core_config
from megatron.trainer.plan import from_flags


@dataclass(frozen=True)
class Outlook:
    """Simulated seconds of a batch, without the decision and with it; `missed`: what was asked for by hand and is
    impossible, or None."""

    before: float
    after: float
    missed: str | None = None


@dataclass(frozen=True)
class Change:
    """The outcome of a change of arrangement.

    Attributes:
        before, after: how the job was arranged, and is.
        num_layers: of the model.
        num_bytes: of all ranks' new state, and how many of them came from other ranks.
        seconds: from the old engine's end to the new one's beginning.
    """

    before: Arrangement
    after: Arrangement
    num_layers: int
    num_bytes: int
    bytes_moved: int
    seconds: float

    def describe(self, outlook: Outlook | None = None) -> str:
        """One line for the log."""
        text = (
            f"frozen layers: {self.after.num_frozen} of {self.num_layers} (before {self.before.num_frozen}) | "
            f"pipeline: {self.after.pipeline} (before {self.before.pipeline}) | data: {self.after.data} (before "
            f"{self.before.data}) | layers by rank: {self.after} | state: {self.num_bytes / 2**20:.1f} MiB, "
            f"{self.bytes_moved / 2**20:.1f} from other ranks | change took {self.seconds:.2f} s"
        )
        if self.after.pipelines_in_a_row:
            text += " | the ranks of a pipeline in a row"
        if self.after.micro_batch_size != self.before.micro_batch_size:
            text += f" | microbatch: {self.after.micro_batch_size} (before {self.before.micro_batch_size})"
        if outlook is not None and outlook.before > 0:
            text += f" | predicted seconds of a batch: {outlook.after:.4g} ({outlook.before:.4g} without another cut)"
        return text


def batch_size(args: TrainConfig, arrangement: Arrangement) -> int:
    """The samples of a training batch after any ramp-up. The batches of an evaluation have the size that the flags
    give."""
    if args.elastic_batch == "constant":
        return args.global_batch_size
    return args.global_batch_size * arrangement.data // args.first_arrangement.data


def iterations_to_the_end(args: TrainConfig, *, iteration: int, consumed_samples: int) -> int:
    """The last iteration of a run that is at this position: a grown batch uses up `--train-samples` in fewer
    iterations."""
    if args.elastic_batch == "constant":
        return args.train_iters
    return iteration + (args.train_samples - consumed_samples) // args.batch_sizes.global_batch_size


def arranged(args: TrainConfig, arrangement: Arrangement) -> TrainConfig:
    """The configuration of the run in this arrangement.

    Raises:
        ValueError: a rank has no layer, batches cannot be shared out to so many replicas, or the schedule does not run
            so few microbatches.
    """
    per_microbatch = arrangement.micro_batch_size * arrangement.data
    sizes = replace(
        args.batch_sizes, samples_per_microbatch=per_microbatch, global_batch_size=batch_size(args, arrangement)
    )
    if args.global_batch_size % per_microbatch:
        raise ValueError(
            f"an evaluation's batch of {args.global_batch_size} samples is not divisible by micro batch size x data "
            f"parallel size ({per_microbatch})"
        )
    stages = arrangement.stages  # refuses a rank without layers at the first arrangement, too
    changed = replace(
        args, arrangement=arrangement, pipeline_model_parallel_size=arrangement.pipeline,
        data_parallel_size=arrangement.data, micro_batch_size=arrangement.micro_batch_size, batch_sizes=sizes,
        frozen_stages=None if arrangement == args.first_arrangement else stages,
    )  # fmt: skip
    schedule, moves_activations = settled_schedule(changed)
    return replace(changed, schedule=schedule, moves_activations=moves_activations)


def as_at_first(args: TrainConfig) -> dict[str, int]:
    """The arguments that `arranged` has changed, as the flags gave them."""
    first = args.first_arrangement
    return {
        "pipeline_model_parallel_size": first.pipeline,
        "data_parallel_size": first.data,
        "micro_batch_size": first.micro_batch_size,
    }


@contextmanager
def reading_changes(args: TrainConfig) -> Iterator[None]:
    """A block that reads a checkpoint's record of changes. Raises CheckpointError where the record is invalid."""
    try:
        yield
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"--load {args.load}: the checkpoint's record of frozen layers is damaged ({type(error).__name__}: "
            f"{error}); choose another with --ckpt-step, or add --finetune to begin anew with its weights"
        ) from error


def first_arrangement(args: TrainConfig) -> Arrangement:
    """What the flags ask for."""
    layers = from_flags.layers_of_stages(core_config.transformer_config(args))
    return Arrangement(args.pipeline_model_parallel_size, args.data_parallel_size, args.micro_batch_size, tuple(layers))


def arrangement_to_begin_with(args: TrainConfig) -> Arrangement:
    """The arrangement in which a run is built, at its start or from a checkpoint (`args.recorded_changes`).

    A checkpoint's own arrangement, where the job has as many ranks as when it was decided and the flags ask for the
    same as then; else what the flags say. Frozen layers stay frozen, unless the optimizer's state is not loaded and
    nothing is to freeze.

    Raises:
        CheckpointError: the checkpoint has frozen layers, and the run would train them; or what it says is damaged.
    """
    first, recorded = args.first_arrangement, args.recorded_changes
    if recorded is None:
        return first
    with reading_changes(args):
        wanted, asked_for = (Arrangement.from_state(recorded[name]) for name in ("wanted", "first"))
        if sum(wanted.layers_of_rank) != sum(asked_for.layers_of_rank):
            raise ValueError(f"{wanted.layers_of_rank} are fewer or more layers than {asked_for.layers_of_rank}")
    if args.no_load_optim and not args.freeze_training:
        return first
    if wanted.num_frozen and not (args.freeze_training or args.skip_train):
        raise CheckpointError(
            f"--load {args.load}: {wanted.num_frozen} layers of the checkpoint are frozen, and their optimizer state "
            "is gone; add --freeze-training, or to train all --no-load-optim, or --finetune to begin anew with its "
            "weights"
        )
    if sum(wanted.layers_of_rank) != args.num_layers:
        return first  # of another model; loading says in what it differs
    unchanged = first.with_frozen(wanted.num_frozen)
    if asked_for != first or (wanted.pipeline != first.pipeline and not args.elastic_pipeline):
        return unchanged
    if wanted.cached and args.activation_cache is None:
        return unchanged
    try:
        arranged(args, wanted)
    except ValueError:  # the flags ask for other batches, or another schedule
        return unchanged
    return wanted
