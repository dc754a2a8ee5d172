"""Rules about the optimizer: sharded state, tensor parallelism, weight decay and learning rate."""

from megatron.trainer.arguments.flags.config import choice_of
from megatron.trainer.arguments.flags.specification import Arguments, name_of


def optimizer(args: Arguments) -> None:
    if args.start_weight_decay is not None or args.end_weight_decay is not None:
        if args.start_weight_decay is None or args.end_weight_decay is None:
            raise ValueError("--start-weight-decay and --end-weight-decay belong together")
        if not 0 <= args.start_weight_decay <= args.end_weight_decay:
            raise ValueError("--start-weight-decay must be at least 0 and at most --end-weight-decay")
    elif args.weight_decay_incr_style != "constant":
        raise ValueError(
            f"--weight-decay-incr-style {args.weight_decay_incr_style} needs --start-weight-decay and "
            f"--end-weight-decay"
        )
    if args.weight_decay_incr_style == "constant":
        if args.start_weight_decay is not None and args.start_weight_decay != args.end_weight_decay:
            raise ValueError(
                "--weight-decay-incr-style constant needs equal --start-weight-decay and --end-weight-decay"
            )
        if args.start_weight_decay is None:
            args.start_weight_decay = args.end_weight_decay = args.weight_decay
    if args.overlap_param_gather and not args.use_distributed_optimizer:
        raise ValueError("--overlap-param-gather needs --use-distributed-optimizer")
    if args.overlap_param_gather and not args.overlap_grad_reduce:
        raise ValueError("--overlap-param-gather needs --overlap-grad-reduce")
    _whole_tensors(args)
    _precision_aware(args)


def learning_rate(args: Arguments) -> None:
    if args.skip_train:
        args.lr = args.lr or 0.0
    if args.lr is None:
        raise ValueError("--lr is needed")
    if args.muon_scalar_lr is not None and args.muon_scalar_min_lr is None and (args.min_lr or 0) > args.muon_scalar_lr:
        raise ValueError(
            f"--min-lr {args.min_lr} is greater than --muon-scalar-lr {args.muon_scalar_lr}, which would rise to it; "
            "give --muon-scalar-min-lr"
        )
    for low, high in (
        ("min_lr", "lr"),
        ("lr_warmup_init", "lr"),
        ("decoupled_min_lr", "decoupled_lr"),
        ("muon_scalar_min_lr", "muon_scalar_lr"),
    ):
        small, large = getattr(args, low), getattr(args, high)
        if small is not None and large is not None and small > large:
            raise ValueError(f"{name_of(low)} {small} is greater than {name_of(high)} {large}")
    by_samples = args.train_samples is not None
    wrong, right = ("iters", "samples") if by_samples else ("samples", "iters")
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if getattr(args, f"{name}_{wrong}"):
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag}-{wrong} does not fit --train-{right}; use --{flag}-{right}")
    if args.lr_warmup_fraction is not None and (args.lr_warmup_iters or args.lr_warmup_samples):
        raise ValueError("--lr-warmup-fraction and --lr-warmup-iters or --lr-warmup-samples exclude each other")
    if args.lr_decay_style == "WSD" and not (args.lr_wsd_decay_iters or args.lr_wsd_decay_samples):
        raise ValueError(f"--lr-decay-style WSD needs --lr-wsd-decay-{right}")
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        raise ValueError("--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other")
    decay = (args.lr_decay_samples or args.train_samples) if by_samples else (args.lr_decay_iters or args.train_iters)
    warmup = args.lr_warmup_samples if by_samples else args.lr_warmup_iters
    if not args.skip_train and warmup >= decay:
        raise ValueError(
            f"a warm-up of {warmup} {right} is not shorter than the decay of {decay} {right}; shorten "
            f"--lr-warmup-{right} or set --lr-decay-{right}"
        )


def _whole_tensors(args: Arguments) -> None:
    """Refuse sharded state for optimizers that need whole tensors, such as LAMB, whose step depends on their norms."""
    if args.optimizer == "sgd" and args.use_distributed_optimizer:
        raise ValueError(
            "--use-distributed-optimizer does not go with --optimizer sgd: megatron.core shards the state of Adam "
            "alone; leave one of the two out"
        )
    if args.optimizer == "muon" and args.use_distributed_optimizer:
        _whole_parameters(args)
    if args.optimizer == "muon" and args.muon_tp_mode == "distributed":
        raise ValueError(
            "--muon-tp-mode distributed, which iterates on shared matrices without gathering them, is not supported; "
            "use duplicated, which gives the same numbers but for rounding"
        )
    if args.optimizer == "muon":
        _matrices_of_tensor_ranks(args)
    if args.optimizer != "lamb":
        return
    for name, (is_asked, reason) in {
        "--use-distributed-optimizer": (
            args.use_distributed_optimizer,
            "cuts weights into shards, of which no rank has the norm of a whole one",
        ),
        f"--tensor-model-parallel-size {args.tensor_model_parallel_size}": (
            args.tensor_model_parallel_size > 1,
            "gives each rank a part of a weight, whose norm is not the whole one's",
        ),
        f"--2bw-provisional {args.pipeline_2bw_provisional}": (
            args.pipeline_2bw_provisional != "off" and args.pipeline_2bw_provisional_microbatches != 0,
            "predicts weights element by element",
        ),
        "--optimizer-kernel fused": (args.optimizer_kernel == "fused", "is a kernel of Adam and SGD"),
    }.items():
        if is_asked:
            raise ValueError(
                f"{name} does not go with --optimizer lamb, which steps a weight by its norm: it {reason}; leave it "
                "out, or use adam"
            )


def _precision_aware(args: Arguments) -> None:
    """Refuse dtypes of moments that the optimizer does not keep, and flags that exclude narrow moments."""
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        value = getattr(args, name)
        if value not in ("fp32", "bf16"):
            raise ValueError(
                f"{name_of(name)} {value} has so narrow a range that it takes scales, which are not kept; use bf16"
            )
        if value != "fp32" and not args.use_precision_aware_optimizer:
            raise ValueError(f"{name_of(name)} {value} needs --use-precision-aware-optimizer; add it")
    if not args.use_precision_aware_optimizer:
        return
    choice = choice_of(args)
    for name, (is_asked, remedy) in {
        f"--optimizer {args.optimizer}": (args.optimizer != "adam", "use adam"),
        "a run without --use-distributed-optimizer": (
            not args.use_distributed_optimizer and choice.residency is None,
            "add it",
        ),
        "--grad-reduce-in-bf16": (args.grad_reduce_in_bf16, "leave it out, since gradients are FP32"),
        "--optimizer-kernel fused": (args.optimizer_kernel == "fused" and choice.residency is None, "leave it out"),
        f"--2bw-provisional {args.pipeline_2bw_provisional}": (
            args.pipeline_2bw_provisional != "off" and args.pipeline_2bw_provisional_microbatches != 0,
            "use --2bw-provisional off: predictions read moments in FP32",
        ),
    }.items():
        if is_asked:
            raise ValueError(f"--use-precision-aware-optimizer does not go with {name}; {remedy}")


def _whole_parameters(args: Arguments) -> None:
    """Refuse flags that do not work if replicas own whole parameters."""
    for name, (is_asked, reason) in {
        "--overlap-param-gather": (args.overlap_param_gather, "replicas exchange weights at the end of STEP"),
        "--freeze-training": (args.freeze_training, "layers that freeze would change the owners"),
        "--elastic-pipeline": (args.elastic_pipeline, "another number of replicas would have other owners"),
    }.items():
        if is_asked:
            raise ValueError(
                f"{name} does not go with --optimizer muon and --use-distributed-optimizer, with which replicas own "
                f"whole parameters: {reason}; leave {name} or --use-distributed-optimizer out"
            )


def _matrices_of_tensor_ranks(args: Arguments) -> None:
    """Refuse flags with which Muon cannot step a matrix that tensor ranks shard."""
    tensor, groups = args.tensor_model_parallel_size, args.num_query_groups if args.group_query_attention else None
    if args.pipeline_schedule == "l2l" and tensor > 1 and args.muon_tp_mode == "duplicated":
        raise ValueError(
            "--muon-tp-mode duplicated does not go with --pipeline-schedule l2l and tensor parallelism: the host's "
            "optimizer steps beside forwards that use the tensor ranks' group; use blockwise"
        )
    if groups is not None and groups < tensor and args.muon_tp_mode == "blockwise" and args.muon_split_qkv:
        raise ValueError(
            f"--tensor-model-parallel-size {tensor} gives each rank a part of one of {groups} query groups, so Muon "
            "cannot tell queries, keys and values apart; add --muon-no-split-qkv, or --muon-tp-mode duplicated"
        )
