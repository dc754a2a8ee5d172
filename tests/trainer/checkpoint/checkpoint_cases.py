"""What the worker processes do in test_checkpoint.py. Each case leaves no parallel state behind."""

import argparse
import contextlib
import dataclasses
import logging
import os
import queue
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.transformer.enums import AttnBackend
from megatron.pipeline.program.weight_policies import FLUSH, TWO_BW, WeightPolicy
from megatron.pipeline.runtime.stages.megatron.groups import name_groups_of_survivors
from megatron.pipeline.runtime.update.versions import WeightVersions
from megatron.trainer.checkpoint.checkpoint import CheckpointPosition, RunParts, load_checkpoint, save_checkpoint
from megatron.trainer.checkpoint.directory import iteration_directory
from megatron.trainer.checkpoint.state import random_state
from megatron.trainer.checkpoint.writer import CheckpointWriter
from tests.full_disk import largest_file
from tests.trainer.checkpoint import small_run

SAVED_AT = 3


def _save(run, directory, *, iteration=SAVED_AT, update=None, **changes):
    writer = CheckpointWriter(directory)
    args = argparse.Namespace(**{**vars(run.args), **changes})
    position = CheckpointPosition(
        iteration=iteration,
        consumed_train_samples=iteration * small_run.GLOBAL_BATCH,
        consumed_valid_samples=8,
        num_floating_point_operations_so_far=1e12,
    )
    save_checkpoint(writer, RunParts(run.chunks, run.optimizer, run.scheduler, update), args=args, position=position)
    return writer


def _load(run, directory, *, update=None, **changes):
    args = argparse.Namespace(**{**vars(run.args), "load": directory, **changes})
    return load_checkpoint(RunParts(run.chunks, run.optimizer, run.scheduler, update), args=args)


def _started(changes):
    return small_run.start(small_run.arguments(**changes))


def save_and_go_on(directory, changes, **save_changes):
    """Train, save, train on: the losses after the save and the weights at the end."""
    run = _started(changes)
    run.train(0, SAVED_AT)
    writer = _save(run, directory, **save_changes)
    losses = run.train(SAVED_AT, 3)
    writer.finish()
    small_run.finish()
    return losses, run.parameters()


def save_and_listen(directory, changes):
    """`save_and_go_on`, and the warnings of megatron.core's distributed optimizer meanwhile."""
    messages, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("megatron.core.optimizer.distrib_optimizer")
    logger.addHandler(handler)
    try:
        return *save_and_go_on(directory, changes), messages
    finally:
        logger.removeHandler(handler)


def load_and_go_on(directory, changes, **load_changes):
    """Load into a fresh run with other initial weights, train on: position, losses, weights at the end."""
    run = _started({**changes, "seed": 99})
    position = _load(run, directory, **load_changes)
    losses = run.train(SAVED_AT, 3)
    small_run.finish()
    return position and dataclasses.asdict(position), losses, run.parameters()


def load_error(directory, changes, decay_steps=None, **load_changes):
    """The error of a load, which must come on every rank, and whether the weights were left alone."""
    run = _started(changes)
    run.scheduler.lr_decay_steps = decay_steps or run.scheduler.lr_decay_steps
    before = run.parameters()
    try:
        _load(run, directory, **load_changes)
        message = None
    except ValueError as error:
        message = str(error)
    untouched = all(torch.equal(value, before[name]) for name, value in run.parameters().items())
    small_run.finish()
    return message, untouched


class _Update:
    """As much of a weight update as checkpoints look at."""

    def __init__(self, run, window):
        parameters = dict(run.chunks[0].named_parameters())
        self.versions = WeightVersions(parameters, window=window)
        self.weights = {1: FLUSH, 2: TWO_BW, 3: WeightPolicy("3bw", delay=2)}[window]
        self.scales = None

    def show_newest(self):
        self.versions.show_newest()

    def restore_routers(self, state):
        """There are none."""

    def state_dict(self):
        return {"scales": {"4": 1024.0}}

    def load_state_dict(self, state):
        self.scales = state and state["scales"]

    def snapshot(self):
        return {
            version: {name: tensor.clone() for name, tensor in self.versions.tensors(version).items()}
            for version in self.versions.live()
        }


def save_two_versions(directory, changes):
    """Save a run whose versions 2 and 3 differ; both, by name."""
    run = _started(changes)
    update = _Update(run, window=2)
    update.versions.reset(1, 2)
    with update.versions.making(3) as tensors:
        for tensor in tensors.values():
            tensor.add_(1.0)
    assert update.versions.live() == [2, 3]
    _save(run, directory, update=update)
    small_run.finish()
    return update.snapshot()


def save_three_versions(directory, changes, *, skips=()):
    """Save a run whose versions 1, 2 and 3 differ, but for those that are skipped; all, by name."""
    run = _started(changes)
    update = _Update(run, window=3)
    update.versions.reset(0, 1)
    for version in (2, 3):
        if version in skips:
            update.versions.alias(version, of=version - 1)
            continue
        with update.versions.making(version) as tensors:
            for tensor in tensors.values():
                tensor.add_(float(version))
    assert update.versions.live() == [1, 2, 3]
    _save(run, directory, update=update)
    small_run.finish()
    return update.snapshot()


def load_versions(directory, changes, windows, **load_changes):
    """For each of `windows` load into a run with that many live versions: all of them by name, the slots used, the
    restored scales."""
    found = []
    for window in windows:
        run = _started({**changes, "seed": 99})
        update = _Update(run, window)
        _load(run, directory, update=update, **load_changes)
        small_run.finish()
        found.append((update.snapshot(), update.versions.num_slots, update.scales))
    return found


def save_as_megatron_lm_does(directory, changes, more=()):
    """Write a checkpoint with bare megatron.core calls, entry by entry as Megatron-LM 0.16 does by default, its
    arguments completed as there; with weights of the names `more`, too."""
    run = _started(changes)
    run.train(0, SAVED_AT)
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if run.args.use_distributed_optimizer:
        metadata["distrib_optim_sharding_type"] = "dp_reshardable"
    model = run.chunks[0].module.sharded_state_dict(metadata=dict(metadata))
    for name in more:
        model[name] = ShardedTensor.from_rank_offsets(name, torch.ones(4), replica_id=dist.get_rank())
    args = argparse.Namespace(
        **{**vars(run.args), "add_qkv_bias": True, "layernorm_zero_centered_gamma": False, "num_experts": None},
        **{"consumed_train_samples": 12, "consumed_valid_samples": 0, "rank": 0, "local_rank": 0},
        attention_backend=AttnBackend.auto,
    )
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": SAVED_AT,
        "model": model,
        "optimizer": run.optimizer.sharded_state_dict({"model": model}, metadata=dict(metadata)),
        "opt_param_scheduler": run.scheduler.state_dict(),
        "rerun_state_machine": {"mode": "disabled"},
        "rng_state": ShardedObject(
            "rng_state",
            [random_state()],
            (parallel_state.get_pipeline_model_parallel_world_size(), 1),
            (parallel_state.get_pipeline_model_parallel_rank(), 0),
            replica_id=parallel_state.get_data_parallel_rank(),
        ),
        "num_floating_point_operations_so_far": 1e12,
    }
    path = Path(directory) / "iter_0000003"
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
    dist.barrier()
    # megatron.core would serve this queue from a spawned process, which a synchronous save does not need.
    filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(
        state,
        str(path),
        ("torch_dist", 1),
        content_metadata=dict(metadata),
        preprocess_common_before_consistancy_check=lambda common: {**common, "args": None},
    )
    if dist.get_rank() == 0:
        (Path(directory) / "latest_checkpointed_iteration.txt").write_text("3")
    losses = run.train(SAVED_AT, 3)
    small_run.finish()
    return losses, run.parameters()


def load_as_megatron_lm_does(directory, changes):
    """Read a checkpoint of ours with bare megatron.core calls: its common entries, and losses from there on."""
    run = _started({**changes, "seed": 99})
    path = str(Path(directory) / "iter_0000003")
    common = dist_checkpointing.load_common_state_dict(path)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    model = run.chunks[0].module.sharded_state_dict(metadata=dict(metadata))
    optimizer = run.optimizer.sharded_state_dict({"model": model}, is_loading=True, metadata=dict(metadata))
    state = dist_checkpointing.load({"model": model, "optimizer": optimizer}, path, ("torch_dist", 1))
    run.chunks[0].module.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.scheduler.load_state_dict(state["opt_param_scheduler"])
    losses = run.train(SAVED_AT, 3)
    small_run.finish()
    return common, losses


def save_in_background(directory, changes):
    """Change the weights while an asynchronous save is under way; the weights when it was called."""
    run = _started(changes)
    run.train(0, SAVED_AT)
    saved = run.parameters()
    writer = _save(run, directory, async_save=True)
    for parameter in run.chunks[0].parameters():
        parameter.data.fill_(7.0)
    writer.finish()
    small_run.finish()
    return saved


def loaded_weights(directory, changes):
    """The weights in a checkpoint."""
    run = _started({**changes, "seed": 99})
    _load(run, directory)
    small_run.finish()
    return run.parameters()


def save_error(directory, changes):
    """The error of a save into a directory that cannot be made."""
    run = _started(changes)
    try:
        _save(run, directory)
        return None
    except ValueError as error:
        return str(error)
    finally:
        small_run.finish()


def fail_to_write(directory, changes, failing_rank, asynchronous):
    """One rank may write no more than 4 KiB a file: the error on each rank, what lies in the directory after it, and
    that the next save works."""
    run = _started(changes)
    writer = _save(run, directory, iteration=1)
    message = None
    with largest_file(4096) if dist.get_rank() == failing_rank else contextlib.nullcontext():
        try:
            _save(run, directory, iteration=2, async_save=asynchronous).finish()
        except ValueError as error:
            message = str(error)
    dist.barrier()
    names = sorted(os.listdir(directory))
    dist.barrier()
    writer = _save(run, directory, iteration=3)
    writer.finish()
    small_run.finish()
    return message, names, sorted(os.listdir(directory))


def save_with_unequal_copies(directory):
    """Three ranks have the two stages of a model, the second one twice, and save a tensor of each: what is saved."""
    stage, copies = [(0, [0]), (1, [1, 2]), (1, [1, 2])][dist.get_rank()]
    parallel_state.initialize_model_parallel()
    places = [[rank] for rank in copies]
    name_groups_of_survivors(
        places, tensor_size=1, context_size=1, expert_tensor_size=1, expert_size=1, pipeline_rank=stage,
        num_pipeline_ranks=2,
    )  # fmt: skip
    own = torch.full((4,), float(stage))
    replica = (0, 0, copies.index(dist.get_rank()))
    state = {f"stage {stage}": ShardedTensor.from_rank_offsets(f"stage {stage}", own, replica_id=replica)}
    CheckpointWriter(directory).write(state, SAVED_AT, content_metadata={})
    saved = dist_checkpointing.load_plain_tensors(iteration_directory(directory, SAVED_AT))
    small_run.finish()
    del saved["content_metadata"]
    return saved
