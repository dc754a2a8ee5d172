"""Megatron-LM's validated arguments, as far as the drop-in reads them."""

import argparse

from megatron.pipeline.dropin.flags import add_flags


def arguments(flags: str = "", **values: object) -> argparse.Namespace:
    """A run of p=2 that goes with every schedule, with our `flags` and these `values`."""
    parsed = add_flags(argparse.ArgumentParser(allow_abbrev=False)).parse_args(flags.split())
    theirs = {
        "rank": 0, "world_size": 2, "pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 1,
        "data_parallel_size": 1, "virtual_pipeline_model_parallel_size": None, "micro_batch_size": 2,
        "global_batch_size": 8, "rampup_batch_size": None, "clip_grad": 1.0, "fp16": False, "iteration": 0,
        "use_distributed_optimizer": False, "distributed_timeout_minutes": 1, "distributed_backend": "nccl",
        "rerun_mode": "disabled", "optimizer": "adam", "save": None, "load": None, "ckpt_format": "torch_dist",
        "cuda_graph_impl": "none", "context_parallel_size": 1, "finetune": False,
        "check_for_nan_in_loss_and_grad": True, "untie_embeddings_and_output_weights": False,
    }  # fmt: skip
    return argparse.Namespace(**{**vars(parsed), **theirs, **values})
