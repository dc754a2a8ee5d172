"""Rules of runs that continue without lost ranks: `--go-on-without-lost-ranks`."""

from collections.abc import Callable

from megatron.trainer.arguments.flags.config import choice_of, num_places
from megatron.trainer.arguments.flags.specification import Arguments

_Row = tuple[Callable[[Arguments], object], str, str]
"""Whether the row applies, the feature in question, and why a run with this feature cannot continue without a rank."""

_REFUSED: tuple[_Row, ...] = (
    (lambda args: args.data_parallel_size < 2, "one replica", "leaves nobody with the weights of a lost rank"),
    (lambda args: num_places(args) < 2, "--expert-model-parallel-size and one copy of each expert",
     "leaves nobody with the experts of a lost rank"),
    (lambda args: args.tensor_model_parallel_size > 1 and (args.optimizer, args.muon_tp_mode) == ("muon", "duplicated"),
     "--muon-tp-mode duplicated on several tensor ranks",
     "gathers matrices in the middle of a step, which a loss would leave half done: add --muon-tp-mode blockwise"),
    (lambda args: args.num_experts is not None and "global_aux_loss" in args.moe_router_load_balancing_type,
     "--moe-router-load-balancing-type global_aux_loss", "counts tokens over all replicas before each backward"),
    (lambda args: args.redundant_optimizer and args.use_precision_aware_optimizer,
     "--redundant-optimizer and --use-precision-aware-optimizer", "would need copies that keep moments of 16 bits"),
    (lambda args: args.redundant_optimizer and args.optimizer != "adam",
     "--redundant-optimizer and another --optimizer than adam",
     "would need copies of whole parameters, and only Adam's shards are copied"),
    (lambda args: choice_of(args).residency is not None, "weights on the host",
     "steps them in place and in parts, one for each replica of a node, which a loss would leave half done"),
    (lambda args: choice_of(args).policy.updates_alone, "stashed weights", "needs weights that follow from batches"),
    (lambda args: args.schedule.predicts_apart, "predictions of each replica alone",
     "loses that of a lost rank: add --2bw-provisional-reduce, or `# reduce_partial: yes` to a program's file"),
    (lambda args: args.pipeline_2bw_single_gradient_buffer, "--2bw-single-gradient-buffer",
     "steps before it knows the sums that others may lack"),
    (lambda args: args.optimistic_steps, "--optimistic-steps", "may have to take a step back"),
    (lambda args: args.freeze_training or args.elastic_pipeline, "a pipeline that changes while it trains",
     "changes the ranks of its stages by itself"),
    (lambda args: args.made_program is not None and args.made_program.measures,
     "--pipeline-schedule auto and no --pipeline-profile", "changes its program while it trains"),
    (lambda args: args.fp8 is not None and args.fp8_recipe == "delayed", "--fp8-recipe delayed",
     "moves scales on with each microbatch, and has none to return to when a batch is dropped: add --fp8-recipe "
     "tensorwise"),
    (lambda args: args.fp8 is not None and args.fp8_recipe == "tensorwise" and args.sequence_parallel,
     "--fp8-recipe tensorwise and --sequence-parallel",
     "has a group of tensor ranks in each quantizer, which would stay a broken one: add --fp8-recipe blockwise"),
    (lambda args: args.distributed_backend == "nccl", "--distributed-backend nccl",
     "has not been shown to end NCCL's waits: give --distributed-backend gloo"),
)  # fmt: skip


def lost_ranks(args: Arguments) -> None:
    """Refuse flags that exclude a run that continues without lost ranks."""
    if args.redundant_optimizer and not args.use_distributed_optimizer:
        raise ValueError(
            "--redundant-optimizer keeps copies of shards, and without --use-distributed-optimizer each replica has "
            "the whole optimizer; leave it out"
        )
    if not args.go_on_without_lost_ranks:
        for name in ("failure_timeout", "minimum_speed", "redundant_optimizer"):
            if name in args.given:
                raise ValueError(f"--{name.replace('_', '-')} is for --go-on-without-lost-ranks; give both or neither")
        return
    if reason := refusal(args):
        raise ValueError(f"--go-on-without-lost-ranks: {reason}; leave one of the two out")


def refusal(args: Arguments) -> str | None:
    """The reason why a run of `args` cannot continue without a lost rank; None if it can."""
    return next((f"a run with {what} {why}" for applies, what, why in _REFUSED if applies(args)), None)
