"""One run of Megatron-LM's training under a schedule: the methods that the hooks call, in the order of a run.

Megatron-LM builds model and optimizer and loads a checkpoint; then its loop calls its schedule once a batch, evaluates
and saves between batches, and ends. Under the drop-in a batch runs through the engine, and the pipeline is drained
before anything reads weights and before the loop ends. All ranks make the same calls in the same order, so all ranks
drain after the same batch.

Checkpoints: between two batches of 2bw two weight versions are alive, and the next batch uses the older or the
predicted version. Megatron-LM's state of a checkpoint gets two more entries, in this project's own format
(`checkpointed_versions`): that version, tensor by tensor like the model, and 'pipeline', the update's state beside the
optimizer. So a resumed run continues exactly, under the drop-in and under this project's own programs. Megatron-LM asks
for neither entry and loads the checkpoint like any other.
"""

import argparse
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megatron.backend.fixes import follow_shown_gradients
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.utils import get_model_config, unwrap_model
from megatron.documents import counted
from megatron.pipeline.dropin.flags import batches_of, flag_of, name_of, prove, schedule_of, updated_by_megatron
from megatron.pipeline.dropin.refusals import require_supported_model
from megatron.pipeline.dropin.sentences import errors_end_the_job, say
from megatron.pipeline.dropin.stages import RankStages, build_stages, require_ordinary_call
from megatron.pipeline.dropin.start import overlaps_off
from megatron.pipeline.dropin.updates import EngineUpdate, MegatronUpdate
from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.runtime.failure.agreement import gathered
from megatron.pipeline.runtime.stages.megatron.checkpointed_versions import (
    OLDER_VERSIONS,
    PREDICTED_VERSION,
    UPCOMING_VERSION,
    OlderVersions,
    older_versions,
)
from megatron.pipeline.runtime.stages.megatron.pipeline_position import tied_embeddings
from megatron.pipeline.runtime.stages.megatron.split_linears import require_splits
from megatron.pipeline.runtime.stages.megatron.update import MegatronWeightUpdate
from megatron.pipeline.runtime.timeline_files import write_timeline
from megatron.pipeline.schedules.pipeline_schedule import PipelineSchedule
from megatron.pipeline.start_up import late_weights


class Session:
    """One rank's part of the run.

    Args:
        args: Megatron-LM's validated arguments.
        proved: the schedule of `args`, proved before the model is known.

    Attributes:
        checkpoints: the project's entries in checkpoints; None under a schedule that drains, and before the model is
            built.
        is_saving: whether Megatron-LM is making the state of a checkpoint that it saves.
    """

    def __init__(self, args: argparse.Namespace, proved: PipelineSchedule) -> None:
        self._args = args
        self._proved = proved
        self._schedule: PipelineSchedule | None = None
        self._chunks: Sequence[torch.nn.Module] = ()
        self._theirs: MegatronUpdate | None = None
        self._ours: EngineUpdate | None = None
        self._rank: RankStages | None = None
        self._drains: deque[int] = deque(maxlen=64)
        self._num_batches = 0  # of the whole run
        self._began = False
        self._is_refused = False
        self.checkpoints: VersionsInCheckpoints | None = None
        self.is_saving = False

    def is_of(self, args: argparse.Namespace) -> bool:
        """Whether this session was made for `args`; some programs validate their arguments twice."""
        return self._args is args

    @property
    def steps_itself(self) -> bool:
        """Whether the engine steps the optimizer.

        If it does, all ranks already know the values that Megatron-LM would reduce.
        """
        return self._ours is not None

    @property
    def timeout(self) -> timedelta:
        """The longest time that a transfer or a reduction may take."""
        return timedelta(minutes=self._args.distributed_timeout_minutes)

    # --- building

    def take_parts(self, chunks: Sequence[torch.nn.Module], optimizer: Any, scheduler: Any) -> None:
        """Make schedule and weight update for the built model and optimizer, before a checkpoint is loaded.

        Later calls are no-ops, and so is a call without an optimizer. Collective: every rank of the job must call it.
        """
        if self._schedule is not None or optimizer is None:
            return
        self._chunks = list(chunks)
        require_supported_model(self._args, get_model_config(chunks[0]))
        self._schedule = schedule_of(self._args, tied_embeddings=_any_rank_ties(self._chunks))
        if self._schedule != self._proved:
            prove(self._schedule, batches_of(self._args))
        if "overlap_grad_reduce" in overlaps_off(self._args, self._schedule):
            for chunk in self._chunks:  # the buckets stay: they decide the order of norms and checkpoints' layout
                chunk.ddp_config.overlap_grad_reduce = False
        if self._schedule.splits_backward or not updated_by_megatron(self._schedule.weights):
            follow_shown_gradients()
        if self._schedule.splits_backward:
            for chunk in self._chunks:
                require_splits(chunk, get_model_config(chunk))
        if updated_by_megatron(self._schedule.weights):
            self._theirs = MegatronUpdate(self._chunks, get_model_config(self._chunks[0]))
        else:
            self._ours = EngineUpdate(
                self._chunks, optimizer, scheduler, schedule=self._schedule,
                stage=parallel_state.get_pipeline_model_parallel_rank(), timeout=self.timeout,
            )  # fmt: skip
            self._ours.update.show_newest()  # a checkpoint must be loaded into the newest version, not a prediction
            self.checkpoints = VersionsInCheckpoints(self._chunks, self._ours.update, name=name_of(self._args))

    def loaded(self, iteration: int) -> None:
        """Restore the project's entries of the loaded checkpoint. `iteration`: its batches; 0 if none was loaded."""
        if self.checkpoints is not None:
            takes_state = iteration > 0 and not getattr(self._args, "no_load_optim", False)
            self.checkpoints.complete(iteration, takes_state=takes_state)

    def begin(self) -> None:
        """Begin the run with the current model and optimizer, after `args.iteration` batches. Repeats are no-ops."""
        if self._began:
            return
        self._began = True
        if self._ours is not None:
            self._ours.begin(self._args.iteration)
        if self._schedule is None:
            say("--skip-train: no schedule has anything to do")
            return
        say(self._description())
        if delay := late_weights.description(self._schedule, name_of(self._args), max(batches_of(self._args))):
            say(delay)

    def _description(self) -> str:
        schedule, sizes = self._schedule, batches_of(self._args)
        least, most = min(sizes), sizes[-1]
        microbatches = f"{least} to {most} microbatches" if least != most else counted(most, "microbatch")
        who = "the engine steps the optimizer" if self.steps_itself else "Megatron-LM reduces gradients and steps"
        return (
            f"{flag_of(self._args)}: {counted(schedule.num_stages, 'stage')} on "
            f"{counted(schedule.num_ranks, 'rank')}, {microbatches} a batch, proved; {who}"
        )

    # --- batches

    def run_batch(self, call: Mapping[str, Any]) -> list[Any]:
        """Train one batch. `call`: the arguments with which Megatron-LM calls its schedule.

        Returns the losses of each microbatch on the last stage, and [] on other stages.
        """
        if self._rank is None:
            with self._refusing():
                require_ordinary_call(call)
                update = self._theirs or self._ours.update
                self._rank = build_stages(self._args, self._schedule, self._chunks, update, call)
        rank, num_microbatches = self._rank, call["num_microbatches"]
        rank.feed(call)
        num_samples = num_microbatches * call["micro_batch_size"] * self._args.data_parallel_size
        with self._timed(), self._engine_acts():
            reports = rank.engine.run_batch(num_microbatches, num_samples)
            if self._theirs is not None:
                rank.engine.drain()
                self._theirs.finish_batch(rank.forward_steps, call)
        self._num_batches = rank.engine.next_batch
        self._note(reports)
        return rank.losses

    def drain(self) -> None:
        """Finish and step all batches in flight, and show the newest weights.

        The rest of the batches is computed in training mode, whatever the model's current mode.
        """
        if self._rank is None or self._rank.engine.is_drained:
            return
        was_training = [chunk.training for chunk in self._chunks]
        for chunk in self._chunks:
            chunk.train()
        with self._engine_acts():
            reports = self._rank.engine.drain()
            self._ours.update.show_newest()
        for chunk, training in zip(self._chunks, was_training, strict=True):
            chunk.train(training)
        self._drains.append(self._rank.engine.next_batch)
        self._note(reports)

    def agrees_to_stop(self, is_asked: bool) -> bool:
        """Whether any rank was asked to stop, equal on all ranks. `is_asked`: whether this rank was asked to stop.

        Precondition: the engine steps the optimizer.
        """
        if self._rank is not None and is_asked:
            self._rank.engine.stop_requests |= 1
        return self._ours.newest is not None and bool(self._ours.newest.stop_requests)

    def add_to_checkpoint(self, state: dict[str, Any]) -> None:
        """Add the project's entries to the state of a checkpoint that is saved."""
        if self.is_saving and self.checkpoints is not None:
            self.checkpoints.add_to(state, num_batches=self._num_batches or self._args.iteration)

    def finish(self) -> None:
        """Drain, write the timeline and close the engine, after an orderly end of the loop.

        Collective: every rank of the job must call it. All references to the loop's objects are dropped, since data
        loaders end their processes only when nothing refers to the loaders.
        """
        if self._rank is None or self._is_refused:
            return
        self.drain()
        engine, args = self._rank.engine, self._args
        if self.steps_itself and self._ours.newest is not None:
            say(f"the last iteration: {_outcome(self._ours.newest)}")
        if args.pipeline_log_saved_activations:
            self._say_saved()
        if args.pipeline_timeline is not None:
            folder, most = Path(args.pipeline_timeline), args.pipeline_timeline_iterations
            write_timeline(engine, folder, drains=self._drains, most=most)
        engine.close()
        if self._ours is not None:
            self._ours.update.close()
        self._rank.let_go()
        self._rank = None

    def _say_saved(self) -> None:
        own = (self._rank.engine.saved.peaks, self._rank.memory.peak_bytes)
        peaks = gathered(own, parallel_state.get_pipeline_model_parallel_group())
        for rank, (counts, num_bytes) in enumerate(peaks):
            stages = ", ".join(f"{counted(count, 'microbatch')} at stage {stage}" for stage, count in counts.items())
            say(f"pipeline rank {rank} saved at most {num_bytes / 2**20:.2f} MiB of activations, {stages}")

    def _note(self, reports: Sequence[BatchReport]) -> None:
        if self._ours is None:
            return
        self._ours.note(reports)
        for report in reports:
            if report.nan and getattr(self._args, "check_for_nan_in_loss_and_grad", False):
                with self._refusing():
                    raise ValueError(
                        f"the gradient of iteration {report.batch + 1} is not finite (norm {report.grad_norm}); lower "
                        "--lr, or go on regardless with --no-check-for-nan-in-loss-and-grad"
                    )

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """A block in which a ValueError, which must be raised on all ranks alike, ends the job with its sentence."""
        with errors_end_the_job():
            try:
                yield
            except ValueError:
                self._is_refused = True
                raise

    def _engine_acts(self):
        return nullcontext() if self._ours is None else self._ours.engine_acts()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """A block that is timed as a batch in Megatron-LM's schedules.

        Ranks wait for one another before the timer starts only if batches do not overlap.
        """
        config = get_model_config(self._chunks[0])
        if config.timers is None:
            yield
            return
        timer = config.timers("forward-backward", log_level=1)
        timer.start(barrier=config.barrier_with_L1_time and self._theirs is not None)
        yield
        timer.stop()


def _any_rank_ties(chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether the model's first and last stage share an embedding, which the ranks between them do not see.

    Collective: every rank of the pipeline must call it.
    """
    return any(gathered(bool(tied_embeddings(chunks)), parallel_state.get_pipeline_model_parallel_group()))


def _outcome(report: BatchReport) -> str:
    if report.skipped:
        return f"skipped, the loss scale {report.loss_scale:g} overflowed"
    return f"gradient norm {report.grad_norm:.6g}, learning rate {report.learning_rate:.6g}"


PIPELINE = "pipeline"
_VERSIONS = (OLDER_VERSIONS, PREDICTED_VERSION, UPCOMING_VERSION)


@dataclass
class _Found:
    """The checkpoint that is being loaded.

    Attributes:
        folder: its path.
        common: its entries without tensors.
        loaded: the project's tensors, which `versions` asked for.
        versions: the weight versions to restore; None if Megatron-LM asked for no tensors.
    """

    folder: str = ""
    common: dict[str, Any] = field(default_factory=dict)
    loaded: dict[str, Any] = field(default_factory=dict)
    versions: OlderVersions | None = None


class VersionsInCheckpoints:
    """The weight versions of one rank in checkpoints.

    Args:
        chunks: the model chunks, as Megatron-LM wraps them.
        update: the update that holds the versions.
        name: the name of the run's schedule.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], update: MegatronWeightUpdate, *, name: str) -> None:
        self._chunks = [unwrap_model(chunk) for chunk in chunks]
        self._update = update
        self._name = name
        self._found = _Found()

    # Saving.

    def add_to(self, state: dict[str, Any], *, num_batches: int) -> None:
        """Add the project's entries to the state that Megatron-LM saves after `num_batches` batches of the whole run.

        Precondition: the pipeline is drained.
        """
        state[PIPELINE] = {"update": self._update.state_dict()}
        older = self._older(num_batches)
        state.update(older.to_save(self._models(state)))

    # Loading: the common state, then the tensors, then the restored versions.

    def note_common(self, folder: str, state: dict[str, Any] | None) -> None:
        """Keep the entries without tensors of the checkpoint in `folder`. Megatron-LM reads these entries first."""
        self._found = _Found(str(folder), dict(state or {}))

    def ask_for(self, state: dict[str, Any], *, starts_anew: bool) -> None:
        """Add the weight versions that the checkpoint has to the state that Megatron-LM asks for.

        `starts_anew`: whether only weights are loaded, and batches are counted from 0.
        """
        keys = dist_checkpointing.load_tensors_metadata(self._found.folder)
        self._found.versions = self._older(0 if starts_anew else int(self._found.common.get("iteration", 0)))
        entries = self._found.versions.to_load(
            self._models(state), lambda prefix: any(key.startswith(prefix) for key in keys)
        )
        state.update(entries)

    def note_loaded(self, state: dict[str, Any]) -> None:
        """Remove the project's entries from the loaded state, and keep them for `complete`."""
        self._found.loaded = {key: state.pop(key) for key in list(state) if key.startswith(_VERSIONS)}
        if PIPELINE in state:
            self._found.common[PIPELINE] = state.pop(PIPELINE)

    def complete(self, iteration: int, *, takes_state: bool) -> None:
        """Restore the older version and the update's state, after Megatron-LM has loaded the weights.

        Args:
            iteration: number of batches of the loaded checkpoint; 0 if none was found, or only weights were loaded.
            takes_state: whether Megatron-LM has loaded the optimizer, too.
        """
        found, self._found = self._found, _Found()
        older = found.versions.counted_from(iteration) if found.versions else self._older(iteration)
        older.restore(found.loaded if iteration else {})
        state = found.common.get(PIPELINE) or {}
        self._update.load_state_dict(state.get("update") if takes_state else None)
        saved = found.common.get("args")
        saved_under = getattr(saved, "pipeline_program", None) or getattr(saved, "pipeline_schedule", None)
        # Under the same schedule a checkpoint may have one version, too: after a skipped step.
        may_lack = older.is_always_kept or saved_under != self._name
        if iteration and not found.loaded and may_lack:
            say(
                f"warning: the checkpoint of iteration {iteration} was saved under "
                f"{saved_under or 'a schedule of Megatron-LM'} and has one weight version: iteration {iteration + 1} "
                f"computes with it, and not with {older.name} as in a run that had used {self._update.weights.name} "
                "all along"
            )

    def _older(self, num_batches: int) -> OlderVersions:
        return older_versions(self._chunks, self._update, num_batches)

    def _models(self, state: dict[str, Any]) -> dict[str, Any]:
        """The model chunks' entries in a state, by name."""
        names = ["model"] if len(self._chunks) == 1 else [f"model{index}" for index in range(len(self._chunks))]
        return {name: state[name] for name in names}
