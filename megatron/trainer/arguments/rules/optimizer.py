"""Rules about optimizers that step a tensor by the norm of all of it: where no rank has that."""

import argparse


def whole_tensors(args: argparse.Namespace) -> None:
    """What steps in shards: Adam. LAMB's step of a tensor is as long as the norm of its weights says, so it needs the
    tensor whole."""
    if args.optimizer == "sgd" and args.use_distributed_optimizer:
        raise ValueError(
            "--use-distributed-optimizer does not go with --optimizer sgd: megatron.core shards the state of Adam "
            "alone; leave one of the two out"
        )
    if args.optimizer != "lamb":
        return
    for flag, (is_asked, reason) in {
        "--use-distributed-optimizer": (
            args.use_distributed_optimizer,
            "cuts weights into shards, of which no rank has the norm of a whole one",
        ),
        f"--tensor-model-parallel-size {args.tensor_model_parallel_size}": (
            args.tensor_model_parallel_size > 1,
            "gives each rank a part of a weight, whose norm is not the whole one's",
        ),
        f"--2bw-provisional {args.pipeline_2bw_provisional}": (
            args.pipeline_2bw_provisional != "off",
            "predicts weights element by element",
        ),
        "--optimizer-kernel fused": (args.optimizer_kernel == "fused", "is a kernel of Adam and SGD"),
    }.items():
        if is_asked:
            raise ValueError(
                f"{flag} does not go with --optimizer lamb, which steps a weight by its norm: it {reason}; leave it "
                "out, or use adam"
            )
