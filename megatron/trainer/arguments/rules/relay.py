"""Rules about weights that live on the host (`--pipeline-schedule l2l`): how, and what does not go together with it."""

import argparse

from megatron.pipeline.program.lane_order import DEFERRED, EAGER, Residency
from megatron.trainer.arguments.values.pipeline_choice import choice_of


def residency_of(args: argparse.Namespace) -> Residency | None:
    """Where the weights live that `args` ask for; None: on the device."""
    if choice_of(args).residency is None:
        return None
    update = args.l2l_update
    if update == "auto":
        update = DEFERRED if _waits_for(args) else EAGER
    return Residency(args.l2l_resident_stages, update, args.l2l_stash)


def relay(args: argparse.Namespace) -> None:
    """What the relay cannot do together, and its flags without it."""
    schedule = choice_of(args).flag
    if choice_of(args).residency is None:
        for name in ("l2l_update", "l2l_resident_stages", "l2l_stash", "l2l_fetch"):
            if name in args.given:
                raise ValueError(
                    f"--{name.replace('_', '-')} {getattr(args, name)} is about weights on the host, and "
                    f"{schedule} has them on the device; use l2l, or leave it out"
                )
        return
    if args.l2l_update == EAGER and (decides := _waits_for(args)):
        raise ValueError(
            f"--l2l-update eager updates a stage before all gradients are known, and {decides} depends on them all; "
            "use deferred, or leave out the latter (--clip-grad 0, --bf16)"
        )
    if args.l2l_fetch == "shares" and args.data_parallel_size == 1:
        raise ValueError(
            "--l2l-fetch shares gathers a stage's weights from replicas on the node, and there is one replica; leave "
            "it out"
        )
    for name, (is_asked, reason) in {
        "--use-distributed-optimizer": (
            args.use_distributed_optimizer,
            "shards the optimizer's state on the devices, and here each replica's host has it whole",
        ),
        "--recompute-granularity full": (
            args.recompute_granularity == "full",
            "recomputes within what is recomputed already",
        ),
        "--balance-activations": (
            args.balance_activations,
            "moves saved activations to ranks that save few, and with weights on the host ranks save alike",
        ),
        "--pipeline-extra-warmup": (args.pipeline_extra_warmup, "extends a warm-up, and stages in turn have none"),
        "--microbatch-group-size-per-virtual-pipeline-stage": (
            args.microbatch_group_size_per_virtual_pipeline_stage is not None,
            "cuts a batch into groups, and a stage takes a whole batch",
        ),
        "--log-saved-activations": (
            args.log_saved_activations,
            "counts what graphs hold, and cannot tell it from weights that come and go",
        ),
    }.items():
        if is_asked:
            raise ValueError(f"{name} does not go with {schedule}: it {reason}; leave it out")


def _waits_for(args: argparse.Namespace) -> str | None:
    """The flag for which an update has to know the gradients of all stages, if there is one."""
    if args.clip_grad > 0:
        return f"--clip-grad {args.clip_grad:g}"
    return "--fp16" if args.fp16 else None
