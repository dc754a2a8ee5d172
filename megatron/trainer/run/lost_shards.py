"""Shards of the optimizer's state when ranks change: `--go-on-without-lost-ranks` with `--use-distributed-optimizer`.

Problem: no other rank has the shard of master weights and moments of a lost rank, and the remaining ranks need shards
of another size. All ranks need them, too, when a new process takes the place of a lost one.

Solution: each rank's part of the model and the optimizer is built anew over the present ranks. With
`--redundant-optimizer` the new shards are filled from the old shards and from the copies of their peers' shards that
ranks keep (`redundant_shards`), and copies of the new shards are made. If a shard and its copy are both lost, or there
are no copies, all ranks load the last checkpoint and continue from its iteration. A new process gets its shard, and
everything else, in the same way. When a new process joins and no rank is lost, every old shard is present, so neither
copies nor a checkpoint are needed.

Optimizers other than torch's Adam have shards that cannot be sharded anew by themselves: Muon, with which each rank
owns some parameters, and AdamW with 16-bit moments. If such a shard is lost, all ranks go back to the last checkpoint.
When a new process joins, all state goes from the old parts to the new ones as through a checkpoint.

The old shards are kept until all ranks have the new ones. If another rank is lost in between, each rank has the old
shards, the new shards, or both; a new process has the new shards, or none. Each rank says what it has when the ranks
agree who continues. They take the newest shards that all but new processes have and that are complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist

from megatron.core.optimizer import MegatronOptimizer
from megatron.documents import counted
from megatron.pipeline.runtime.copied_stages import CopyRanks
from megatron.pipeline.runtime.failure.agreement import on_rank_zero
from megatron.pipeline.runtime.failure.errors import AgreedError, OnThisRank
from megatron.pipeline.runtime.stages.megatron.optimizers import groups_of_replicas, optimizers_of, shared_scaler
from megatron.pipeline.runtime.stages.megatron.redundant_shards import is_steppable
from megatron.pipeline.runtime.update.muon import Muon
from megatron.pipeline.runtime.update.narrow_moments import NarrowMoments
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.changes.change import collect
from megatron.trainer.changes.state_in_memory import hand_between
from megatron.trainer.checkpoint import directory
from megatron.trainer.checkpoint.checkpoint import CheckpointPosition, load_checkpoint
from megatron.trainer.checkpoint.state import random_state, restore_random_state
from megatron.trainer.run.places import shared_out
from megatron.trainer.start_up.optimizer import choose_kernel
from megatron.trainer.start_up.run import ModelAndOptimizer, Run, setup_model_and_optimizer


@contextmanager
def _then_together() -> Iterator[None]:
    """After the block, wait for the slowest rank, since ranks may then have to connect within a time limit."""
    yield
    dist.barrier()


@contextmanager
def ending_alone() -> Iterator[None]:
    """Let a rank that fails in the block, which hands state over, end alone, while the others continue. Collective.

    Raises OnThisRank on the rank that failed, and RuntimeError on the others, as for a loss.
    """
    try:
        yield
    except AgreedError as error:
        if error.__cause__ is None:
            raise RuntimeError(f"a rank could not take the state: {error}") from error
        raise OnThisRank(str(error)) from error


@dataclass(frozen=True)
class _Built:
    """The result of a recovery.

    Attributes:
        cut: the epoch in which the shards were made.
        position: the position of the checkpoint from which the parts were loaded; None: the run continues.
        told: the log line about this checkpoint.
    """

    cut: int
    parts: ModelAndOptimizer
    position: CheckpointPosition | None = None
    told: str = ""


class LostShards:
    """The handler of the optimizer's state when ranks change.

    Args:
        args, rank: the configuration and the rank with which the run began.
        is_new: whether this process has taken the place of a lost one, and has no state yet.
    """

    def __init__(self, args: TrainConfig, rank: int, *, is_new: bool) -> None:
        self._args, self._rank = args, rank
        self._cut: int | None = None if is_new else 0  # the epoch in which the current shards were made
        self._built: _Built | None = None  # beside the current parts, until all ranks have built theirs
        # For dense weights and experts, the ranks, by their first numbers, that send this one its shards.
        self._sources: list[list[int]] | None = None
        self._told = ""

    @property
    def is_new(self) -> bool:
        """Whether this process has no state on which the others count."""
        return self._cut is None

    def require_takes_over(self, run: Run) -> None:
        """Raise OnThisRank if this new process could not take over a shard."""
        if not is_steppable(run.optimizer) and not isinstance(_stepped_by(run.optimizer), (Muon, NarrowMoments)):
            raise OnThisRank(
                f"rank {self._rank} was started again, and shards of Apex's and Transformer Engine's Adam are not "
                "handed to new processes; leave --max-restarts out"
            )

    def prepare_move(self, run: Run) -> None:
        """Let replicas that own parts of predicted weights exchange these before their connections end.

        Collective over the present ranks; the run is drained. Shards need no exchange.
        """
        if run.update.weights.predicts and not is_steppable(run.optimizer):
            run.update.versions.keep_for_move()

    def note(self, run: Run) -> dict:
        """This rank's state for the others: epoch of its shards -> version, sums and shards."""
        found = {} if self.is_new else {self._cut: run.model_and_optimizer}
        if self._built is not None:
            found[self._built.cut] = self._built.parts
        return {str(cut): _held(parts) for cut, parts in found.items()}

    def choose(self, run: Run, notes: Mapping[int, dict]) -> list[dict]:
        """Choose the shards from which the present ranks continue; return the ranks' entries for them.

        The list is empty if the last checkpoint is to be loaded.

        Args:
            notes: rank of the job as it began -> its message, with `note` as "shards" and `is_new` as "is_new".
        """
        args = self._args
        own = shared_out(args, self._rank)
        known = {rank: {int(cut): held for cut, held in each["shards"].items()} for rank, each in notes.items()}
        for cut in sorted({cut for each in known.values() for cut in each}, reverse=True):
            held = {rank: each[cut] for rank, each in known.items() if cut in each}
            if not all(rank in held or each["is_new"] for rank, each in notes.items()):
                continue
            sources = [self._sources_of_kind(kind, held) for kind in range(len(own))]
            if None not in [each for of_kind in sources for each in of_kind.values()]:
                if self._built is not None and self._built.cut == cut:
                    self._take(run, self._built)
                self._sources = [of_kind[part] for of_kind, part in zip(sources, own, strict=True)]
                self._built = None
                return list(held.values())
        self._sources = self._built = None  # parts that are built but not chosen now will never be used
        return []

    def rebuild(self, run: Run, copies: CopyRanks | None, *, epoch: int, ranks: Sequence[int]) -> None:
        """Build this rank's part of the model and the optimizer anew, and give them to the run. Collective.

        Args:
            copies: None if all ranks are present.
            epoch: the epoch of the present ranks.
            ranks: the present ranks, by their numbers when the job began.

        Raises:
            ValueError: the state is lost, and there is no checkpoint.
        """
        root = None if self._sources is not None else self._checkpoint(run)
        drawn = random_state()
        args = replace(run.args, rank=dist.get_rank(), world_size=dist.get_world_size())
        parts = setup_model_and_optimizer(args, run.program, draws=False, copies=copies, locally=_then_together)
        built = _Built(epoch, parts)
        if root is None:
            self._hand_over(run, parts, [[ranks.index(rank) for rank in of_kind] for of_kind in self._sources])
        else:
            as_saved = {"ckpt_step": None, "finetune": False} if run.has_saved else {}
            position = load_checkpoint(parts, args=replace(args, load=root, **as_saved), say=run.reporter.say)
            built = _Built(epoch, parts, position, self._fallen_back(run, root, position))
            parts.update.keep_shards(copies=args.redundant_optimizer)
        choose_kernel(parts.optimizer, args.optimizer_kernel)
        restore_random_state([drawn])
        self._built = built
        dist.barrier()  # a rank that passes it knows that the others have built their parts
        self._take(run, built)
        collect(run)

    def tell(self) -> str:
        """The log line about the last recovery, returned once; then empty."""
        told, self._told = self._told, ""
        return told

    # --- parts

    def _sources_of_kind(self, kind: int, held: Mapping[int, dict]) -> dict[tuple[int, int], list[int] | None]:
        """As `_sources`, for all dense weights or all experts of the job. `kind`: an index in `shared_out`."""
        of_weights: dict[tuple[int, int], dict[int, dict]] = {
            shared_out(self._args, rank)[kind]: {} for rank in range(self._args.world_size)
        }
        for rank, each in held.items():
            of_weights[shared_out(self._args, rank)[kind]][rank] = each["shards"][kind]
        return {weights: _sources(found) for weights, found in of_weights.items()}

    def _take(self, run: Run, built: _Built) -> None:
        if built.position is not None:
            run.stand_at(built.position)
            run.saved_iteration = built.position.iteration
        run.model_and_optimizer, self._cut, self._built = built.parts, built.cut, None
        self._told = built.told or self._told

    def _hand_over(self, run: Run, built: ModelAndOptimizer, sources: Sequence[Sequence[int]]) -> None:
        """Fill `built` with the state of the current shards; set a new process's run to the position of the others."""
        before = None if self.is_new else run.model_and_optimizer
        shards, copies = None if before is None else before.update.shards, self._args.redundant_optimizer
        built.update.keep_shards(shards, sources, copies=copies)
        told = [None if before is None else (*_numbers(before), run.position(), run.saved_iteration)]
        dist.broadcast_object_list(told, sources[0][0], group=built.chunks[0].intra_dp_cp_group)
        [(of_scheduler, of_scaler, of_update, position, saved_iteration)] = told
        if is_steppable(built.optimizer):
            built.scheduler.load_state_dict(of_scheduler)
            if of_scaler is not None:
                shared_scaler(built.optimizer).load_state_dict(of_scaler)
            built.update.load_state_dict(of_update)
            built.update.restore_routers(of_update)
        else:
            with ending_alone():
                hand_between(before, built, iteration=position.iteration)
        if self.is_new:  # the notes may be from before a checkpoint was loaded
            run.stand_at(position)
            run.saved_iteration = saved_iteration

    def _checkpoint(self, run: Run) -> str:
        """The directory of the checkpoint to go back to: this job's last one, or else the one with which it began.

        Collective. Raises ValueError if there is none.
        """
        root = self._args.save if run.has_saved else self._args.load
        if root is not None and on_rank_zero(lambda: directory.locate(root)) is None:
            root = None
        if root is None:
            lost = "a lost rank's shard of the optimizer's state"
            why = f"{lost} and its copy are both lost" if self._args.redundant_optimizer else f"nobody else has {lost}"
            give = "" if self._args.redundant_optimizer else "--redundant-optimizer, or "
            raise ValueError(
                f"{why}, and there is no checkpoint to go back to: restart from the beginning, and give {give}"
                "--save with --save-interval"
            )
        return root

    def _fallen_back(self, run: Run, root: str, position: CheckpointPosition) -> str:
        lost = "a shard of the optimizer's state and its copy are" if self._args.redundant_optimizer else (
            "a shard of the optimizer's state, of which there is no copy, is"
        )  # fmt: skip
        repeated = counted(max(run.iteration - position.iteration, 0), "iteration")
        return f"{lost} lost, so the ranks have loaded the checkpoint in {root}, and repeat {repeated}"


def _numbers(parts: ModelAndOptimizer) -> tuple[dict, dict | None, dict]:
    """The state of scheduler, loss scaler and weight update, which is the same on all ranks."""
    scaler = shared_scaler(parts.optimizer)
    of_scaler = None if scaler is None else {
        # A tensor on its device would be restored on the device with the same number elsewhere.
        name: value.cpu() if torch.is_tensor(value) else value
        for name, value in scaler.state_dict().items()
    }  # fmt: skip
    return parts.scheduler.state_dict(), of_scaler, parts.update.state_dict()


def _held(parts: ModelAndOptimizer) -> dict:
    update = parts.update
    sums = update.sums_of_newest()
    if update.shards is not None:
        shards = [{"held": each.held, "size": each.cut.size} for each in update.shards.of_optimizers]
    else:
        groups = groups_of_replicas(parts.optimizer, parts.chunks[0])
        is_whole = update.is_drained and (not update.weights.predicts or update.versions.is_kept_for_move)
        shards = [{"held": [group.rank()] * is_whole, "size": group.size()} for group in groups]
    return {
        "version": update.newest_version,
        "sums": None if sums is None else asdict(sums),
        "shards": shards,
    }


def _stepped_by(optimizer: MegatronOptimizer) -> torch.optim.Optimizer | None:
    return optimizers_of(optimizer)[0].optimizer


def _sources(held: Mapping[int, dict]) -> list[int] | None:
    """For each shard the rank that hands it over: its owner, or the rank with its copy. None if a shard is lost.

    `held`: rank -> what it has of these shards, as in `note`.
    """
    size = max((each["size"] for each in held.values()), default=0)
    found: dict[int, int] = {}
    for place in reversed(range(size)):  # so that a rank's own shard, which comes first, is set last
        found |= {each["held"][place]: rank for rank, each in held.items() if len(each["held"]) > place}
    return [found[shard] for shard in range(size)] if found and len(found) == size else None
