import argparse
import os


def add_megatron_arguments(parser):
    group = parser.add_argument_group("all of them")
    for name, kind, default in (
        ("num-layers", int, 4),
        ("hidden-size", int, 32),
        ("num-attention-heads", int, 4),
        ("seq-length", int, 16),
        ("vocab-size", int, 64),
        ("micro-batch-size", int, 2),
        ("global-batch-size", int, 8),
        ("train-iters", int, 4),
        ("seed", int, 1234),
        ("lr", float, 1e-2),
        ("min-lr", float, 1e-3),
        ("clip-grad", float, 1.0),
        ("weight-decay", float, 0.01),
        ("tensor-model-parallel-size", int, 1),
        ("pipeline-model-parallel-size", int, 1),
        ("virtual-pipeline-model-parallel-size", int, None),
        ("eval-interval", int, 0),
        ("eval-iters", int, 1),
        ("save", str, None),
        ("save-interval", int, 0),
        ("load", str, None),
        ("exit-interval", int, 0),
        ("distributed-backend", str, "nccl"),
        ("distributed-timeout-minutes", int, 10),
        ("ckpt-format", str, "torch_dist"),
    ):
        group.add_argument(f"--{name}", type=kind, default=default)
    group.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    group.add_argument("--skip-train", action="store_true")
    group.add_argument("--overlap-grad-reduce", action="store_true")
    return parser


def parse_args(extra_args_provider=None):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser = add_megatron_arguments(parser)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    args = parser.parse_args()
    args.rank = int(os.getenv("RANK", "0"))
    args.world_size = int(os.getenv("WORLD_SIZE", "1"))
    args.local_rank = int(os.getenv("LOCAL_RANK", "0"))
    return args


def validate_args(args):
    model_parallel_size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    assert args.world_size % model_parallel_size == 0
    args.data_parallel_size = args.world_size // model_parallel_size
    args.consumed_train_samples = 0
    args.iteration = 0
