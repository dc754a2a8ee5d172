from pathlib import Path

import torch

from megatron.core import dist_checkpointing
from megatron.core.utils import unwrap_model
from megatron.training.global_vars import get_args


def _folder(base, iteration):
    return Path(base) / f"iter_{iteration:07d}"


def generate_state_dict(args, model, optimizer, opt_param_scheduler, iteration=None, is_loading=False):
    state = {"args": args, "checkpoint_version": 3.0}
    if iteration is not None:
        state["iteration"] = iteration
    for index, chunk in enumerate(model):
        state["model" if len(model) == 1 else f"model{index}"] = chunk.sharded_state_dict()
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading)
        state["opt_param_scheduler"] = opt_param_scheduler.state_dict()
    return state


def save_checkpoint(
    iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far, checkpointing_context=None
):
    args = get_args()
    folder = _folder(args.save, iteration)
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    state = generate_state_dict(args, unwrap_model(model), optimizer, opt_param_scheduler, iteration=iteration)
    dist_checkpointing.save(state, str(folder))
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (Path(args.save) / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        print(f"  successfully saved checkpoint from iteration {iteration:7d} to {args.save}", flush=True)
    torch.distributed.barrier()


def _load_base_checkpoint(load_dir, args, rank0=False, sharded_state_dict=None):
    tracker = Path(load_dir) / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return None, "", False
    folder = str(_folder(load_dir, int(tracker.read_text())))
    if rank0:
        return dist_checkpointing.load_common_state_dict(folder), folder, False
    return dist_checkpointing.load(sharded_state_dict, folder), folder, False


def load_checkpoint(model, optimizer, opt_param_scheduler):
    args = get_args()
    state, _, _ = _load_base_checkpoint(args.load, args, rank0=True)
    if state is None:
        return 0, 0
    asked = generate_state_dict(args, unwrap_model(model), optimizer, opt_param_scheduler, is_loading=True)
    state, _, _ = _load_base_checkpoint(args.load, args, sharded_state_dict=asked)
    for index, chunk in enumerate(model):
        chunk.load_state_dict(state["model" if len(model) == 1 else f"model{index}"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
        opt_param_scheduler.load_state_dict(state["opt_param_scheduler"])
    args.consumed_train_samples = state["args"].consumed_train_samples
    return state["iteration"], 0
