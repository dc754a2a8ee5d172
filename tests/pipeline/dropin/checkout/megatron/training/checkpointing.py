from pathlib import Path

import torch

from megatron.training.global_vars import get_args


def _file(folder, iteration):
    return Path(folder) / f"iter_{iteration:07d}" / f"rank_{torch.distributed.get_rank()}.pt"


def save_checkpoint(
    iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far, checkpointing_context=None
):
    args = get_args()
    file = _file(args.save, iteration)
    file.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "iteration": iteration,
        "consumed_train_samples": args.consumed_train_samples,
        "model": [chunk.state_dict_for_save_checkpoint() for chunk in model],
        "optimizer": optimizer.state_dict(),
        "opt_param_scheduler": opt_param_scheduler.state_dict(),
    }
    torch.save(state, file)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (Path(args.save) / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        print(f"  successfully saved checkpoint from iteration {iteration:7d} to {args.save}", flush=True)
    torch.distributed.barrier()


def load_checkpoint(model, optimizer, opt_param_scheduler):
    args = get_args()
    iteration = int((Path(args.load) / "latest_checkpointed_iteration.txt").read_text())
    state = torch.load(_file(args.load, iteration), weights_only=False)
    for chunk, chunk_state in zip(model, state["model"], strict=True):
        chunk.load_state_dict(chunk_state)
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
        opt_param_scheduler.load_state_dict(state["opt_param_scheduler"])
    args.consumed_train_samples = state["consumed_train_samples"]
    return state["iteration"], 0
