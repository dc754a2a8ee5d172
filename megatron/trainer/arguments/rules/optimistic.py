"""Rules of optimizer steps that do not wait for the norm of all gradients: `--optimistic-steps`."""

from collections.abc import Callable

from megatron.trainer.arguments.flags.config import choice_of
from megatron.trainer.arguments.flags.specification import Arguments

_Row = tuple[Callable[[Arguments], object], Callable[[Arguments], str], str]
"""Whether the row applies, the feature in question, and why this feature excludes optimistic steps."""


def _named(what: str) -> Callable[[Arguments], str]:
    return lambda args: what


_REFUSED: tuple[_Row, ...] = (
    (lambda args: args.architecture != "gpt", _named("another model than a GPT"), "is not tried with them"),
    (lambda args: choice_of(args).residency is not None, lambda args: choice_of(args).flag,
     "steps on the host, where no copy of the state is kept"),
    (lambda args: not choice_of(args).policy.drains, lambda args: choice_of(args).flag,
     "takes its steps beside later batches already"),
    (lambda args: args.freeze_training, _named("--freeze-training"), "has ranks that run ahead of the others' steps"),
    (lambda args: args.elastic_pipeline, _named("--elastic-pipeline"), "moves a state of which they keep a copy"),
    (lambda args: args.balance_activations or args.pipeline_schedule == "bpipe", _named("balanced activations"),
     "would be on their way between two ranks when all ranks go back"),
    (lambda args: args.pipeline_offload_activations is not None, _named("--pipeline-offload-activations"),
     "would have copies under way when all ranks go back"),
    (lambda args: args.use_distributed_optimizer, _named("--use-distributed-optimizer"),
     "gathers the weights of a step from all replicas"),
    (lambda args: args.num_experts is not None, lambda args: f"--num-experts {args.num_experts}",
     "has routers whose counts and biases are not undone"),
    (lambda args: args.mtp_num_layers is not None, lambda args: f"--mtp-num-layers {args.mtp_num_layers}",
     "has losses that are not undone"),
    (lambda args: args.calculate_per_token_loss, _named("--calculate-per-token-loss"),
     "divides gradients by a number of tokens that comes with the norm"),
    (lambda args: args.fp8 is not None, lambda args: f"--fp8-format {args.fp8}", "has scales that are not undone"),
    (lambda args: args.optimizer != "adam" or args.use_precision_aware_optimizer,
     lambda args: f"--optimizer {args.optimizer}" if args.optimizer != "adam" else "--use-precision-aware-optimizer",
     "is not tried with them: they step AdamW of 32-bit moments"),
    (lambda args: args.log_saved_activations, _named("--log-saved-activations"),
     "is not tried with activations that are dropped"),
    (lambda args: args.pipeline_model_parallel_size == 1, _named("--pipeline-model-parallel-size 1"),
     "has no other rank for which a step could wait"),
)  # fmt: skip


def optimistic_steps(args: Arguments) -> None:
    """Refuse flags that optimistic steps exclude."""
    if not args.optimistic_steps:
        return
    for applies, what, why in _REFUSED:
        if applies(args):
            raise ValueError(f"--optimistic-steps: {what(args)} {why}; leave one of the two out")
