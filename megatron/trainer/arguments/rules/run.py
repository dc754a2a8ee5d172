"""Rules about the run: batches, schedule, checkpoints, logging; and those of the optimizer in their place."""

import argparse
from dataclasses import replace
from functools import lru_cache

from megatron.elastic.stages import Stages
from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.schedules import ProgramSchedule, Schedule, TooManyRead
from megatron.pipeline.start_up.late_weights import require_predictions, take_error_feedback
from megatron.planner.job.devices import device_gib
from megatron.planner.memory.schedule_demand import representative_sizes
from megatron.trainer.arguments.flags.config import TrainConfig, choice_of, num_replicas
from megatron.trainer.arguments.flags.model import CLASSIFIERS
from megatron.trainer.arguments.flags.specification import name_of
from megatron.trainer.arguments.flags.values import BatchSizes, parse_steps
from megatron.trainer.arguments.rules import optimizer
from megatron.trainer.arguments.rules.programs import num_samples as num_classified
from megatron.trainer.arguments.rules.schedule import relay, residency_of
from megatron.trainer.arguments.rules.stages import tied_stage

_PATHS = ("save", "load", "pretrained_checkpoint", "load_hf", "pipeline_timeline", "metrics_file", "tensorboard_dir",
          "data_cache_path", "dry_run_json")  # fmt: skip


def paths(args: argparse.Namespace) -> None:
    """Refuse an empty path (of an unset shell variable): it names no place, and does not leave the flag out."""
    for name in _PATHS:
        if getattr(args, name) == "":
            raise ValueError(f"--{name.replace('_', '-')} is empty; name a path or leave the flag out")


def length(args: argparse.Namespace) -> None:
    named = [name_of(name) for name in ("train_iters", "train_samples", "epochs") if getattr(args, name) is not None]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} exclude each other; keep one")
    if not named and not args.skip_train:
        epochs = "--epochs, " if args.architecture in CLASSIFIERS else ""
        raise ValueError(f"{epochs}--train-iters or --train-samples is needed")


def batches(args: argparse.Namespace) -> list[str]:
    """Fills `global_batch_size`, `batch_sizes` and, from `--train-samples` or `--epochs`, `train_iters`."""
    per_microbatch = args.micro_batch_size * args.data_parallel_size
    steps = _batch_size_steps(args)
    if args.global_batch_size is None:
        args.global_batch_size = per_microbatch
    args.batch_sizes = BatchSizes(
        global_batch_size=args.global_batch_size,
        samples_per_microbatch=per_microbatch,
        rampup=tuple(args.rampup_batch_size) if args.rampup_batch_size else None,
        steps=steps,
        round_down=args.decrease_batch_size_if_needed,
        may_resume=args.load is not None,
    )
    if args.train_samples is not None:
        args.train_iters = args.batch_sizes.iterations_for(args.train_samples)
        if args.train_iters == 0:
            raise ValueError(f"--train-samples {args.train_samples} is less than one batch")
    if args.epochs is not None:
        args.train_iters = _iterations_of_epochs(args)
    if args.train_iters is None:
        args.train_iters = 0
    if past := args.batch_sizes.sizes_of_the_past():
        return [
            f"--step-batch-size-schedule: batches of {', '.join(map(str, past))} are not divisible by micro batch size "
            f"x data parallel size ({per_microbatch}), so the run can only go on from a checkpoint after those steps"
        ]
    return []


def _iterations_of_epochs(args: argparse.Namespace) -> int:
    """The number of batches until the last epoch has taken every sample; the last batch is filled up."""
    num_samples = args.epochs * num_classified(args, "train")
    whole = args.batch_sizes.iterations_for(num_samples)
    return whole + (args.batch_sizes.samples_after(whole) < num_samples)


def _batch_size_steps(args: argparse.Namespace) -> tuple[tuple[int, int], ...]:
    """The steps of --step-batch-size-schedule; its last size is the global batch size."""
    if args.step_batch_size_schedule is None:
        return ()
    for name in ("rampup_batch_size", "decrease_batch_size_if_needed"):
        if getattr(args, name):
            raise ValueError(f"--step-batch-size-schedule and --{name.replace('_', '-')} exclude each other; keep one")
    steps = parse_steps(args.step_batch_size_schedule, seq_length=args.seq_length)
    last = steps[-1][1]
    if args.global_batch_size not in (None, last):
        raise ValueError(
            f"--global-batch-size {args.global_batch_size} is not the last size of --step-batch-size-schedule, {last}; "
            "leave the former out"
        )
    args.global_batch_size = last
    return steps


@lru_cache(maxsize=64)
def _interleaves_batches(schedule: Schedule | ProgramSchedule, num_microbatches: int) -> bool:
    """Whether a backward of a batch comes after a backward of a later batch. A known order is asked with the fewest
    microbatches that show it, since a search asks thousands of times."""
    sizes: tuple[int, ...] = ()
    if isinstance(schedule, Schedule):
        schedule = replace(schedule, balance=False)
        sizes = representative_sizes(
            schedule, num_microbatches, least=2 * schedule.num_ranks, step=schedule.num_ranks, count=1
        )
    return schedule.interleaves_batches((sizes or (num_microbatches,)) * 3)


def schedule(args: argparse.Namespace) -> list[str]:
    """Check that the schedule accepts every batch size of the run. Fills `schedule` (a `Schedule`) and
    `moves_activations`."""
    if args.program is None:
        _stages_of_ranks(args)
    weights = choice_of(args).policy
    if args.pipeline_2bw_single_gradient_buffer and weights.delay != 1:
        raise ValueError("--2bw-single-gradient-buffer needs --pipeline-schedule 2bw")
    _predictions(args, weights)
    if weights.updates_alone:
        _updates_alone(args)
    try:
        args.schedule, args.moves_activations = settled_schedule(args)
    except TooManyRead as error:
        raise error.under("--2bw-provisional-microbatches") from error
    smallest = min(args.batch_sizes.all_num_microbatches())
    if args.pipeline_2bw_single_gradient_buffer and _interleaves_batches(args.schedule, smallest):
        raise ValueError(
            f"{choice_of(args).flag} comes back to a batch after a backward of the next one, for "
            "which a single gradient buffer has no room; leave out --2bw-single-gradient-buffer"
        )
    if args.schedule.balance and not args.moves_activations:
        flag = "--balance-activations" if args.balance_activations else f"--pipeline-schedule {args.pipeline_schedule}"
        return [f"{flag} has nothing to move with these stages and batches: saved activations stay where they are"]
    return []


def _stages_of_ranks(args: argparse.Namespace) -> None:
    """Check that the order fits the number of stages on a rank. Several stages without a named schedule select
    `interleaved`, as in Megatron-LM."""
    v, group = args.virtual_pipeline_model_parallel_size, args.microbatch_group_size_per_virtual_pipeline_stage
    if v is not None and "pipeline_schedule" not in args.given:
        args.pipeline_schedule = "interleaved"
    interleaves, on_host = choice_of(args).interleaves, residency_of(args) is not None
    if v is None and interleaves and not on_host:
        count = choice_of(args).virtual_stages or "2 or more"
        raise ValueError(
            f"--pipeline-schedule {args.pipeline_schedule} needs several stages on each rank; add "
            f"--num-virtual-stages-per-pipeline-rank {count}, or use flush"
        )
    if v is not None and not interleaves:
        raise ValueError(
            f"--pipeline-schedule {args.pipeline_schedule} has one stage on each rank, not {v}; use interleaved, or "
            "leave out the flags that ask for several"
        )
    if v is None and group is not None:
        raise ValueError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} says nothing where a rank has one stage; "
            "leave it out, or add --num-virtual-stages-per-pipeline-rank"
        )


def settled_schedule(args: argparse.Namespace | TrainConfig) -> tuple[Schedule | ProgramSchedule, bool]:
    """The schedule, for the layers that are frozen now, and whether it moves activations. Raises ValueError where it
    does not accept a batch size of the run."""
    sizes = set(args.batch_sizes.all_num_microbatches())
    found = _schedule_of_flags(args) if args.frozen_stages is None else behind_frozen(args, args.frozen_stages)
    for num_microbatches in sorted(sizes):
        found.validate(num_microbatches)
    return found, any(found.evicting_ranks((num_microbatches,)) for num_microbatches in sizes)


def _schedule_of_flags(args: argparse.Namespace) -> Schedule | ProgramSchedule:
    if args.program is not None:
        return args.program
    num_virtual_stages = args.virtual_pipeline_model_parallel_size or 1
    residency, reduced = residency_of(args), num_replicas(args)
    has_copies = args.pipeline_model_parallel_size > 1
    if residency is not None:
        has_copies = args.pipeline_model_parallel_size * num_virtual_stages > 1
        reduced *= args.tensor_model_parallel_size  # they sum up what each has seen a part of, stage by stage
    return Schedule.preset(
        args.pipeline_schedule,
        num_stages=args.pipeline_model_parallel_size * num_virtual_stages,
        num_virtual_stages=num_virtual_stages,
        microbatch_group_size=args.microbatch_group_size_per_virtual_pipeline_stage,
        recompute=args.pipeline_recompute,
        extra_warmup=args.pipeline_extra_warmup,
        balance=args.balance_activations,
        data_parallel=reduced > 1,
        tied_embeddings=shares_embedding(args) and has_copies,
        tied_stage=tied_stage(args) if has_copies else None,
        residency=residency,
        predict=args.pipeline_2bw_provisional != "off",
        provisional_microbatches=args.pipeline_2bw_provisional_microbatches,
        reduce_partial=args.pipeline_2bw_provisional_reduce,
    )


def behind_frozen(args: argparse.Namespace, stages: Stages) -> Schedule:
    """The schedule that `args` ask for where some of the `stages` are frozen."""
    return Schedule.preset(
        args.pipeline_schedule,
        num_stages=len(stages.rank_of_stage),
        rank_of_stage=stages.rank_of_stage,
        num_frozen=stages.num_frozen,
        recompute=args.pipeline_recompute,
        extra_warmup=args.pipeline_extra_warmup,
        balance=args.balance_activations,
        data_parallel=num_replicas(args) > 1,
    )


def shares_embedding(args: argparse.Namespace) -> bool:
    """Whether the first and the last stage, where these are two, have copies of one embedding: it is the output layer,
    or layers of multi-token prediction look tokens up."""
    return not args.untie_embeddings_and_output_weights or args.mtp_num_layers is not None


def _predictions(args: argparse.Namespace, weights: WeightPolicy) -> None:
    """Check what predicted weights require, and what they exclude."""
    take_error_feedback(args)
    require_predictions(args, weights, choice_of(args).name)
    mode = args.pipeline_2bw_provisional
    if mode != "off" and args.pipeline_2bw_single_gradient_buffer:
        reason = f"--2bw-provisional {mode} reads gradients that --2bw-single-gradient-buffer gives away early"
        if args.pipeline_2bw_error_feedback:
            reason = (
                "--2bw-error-feedback takes the update of a STEP again, and --2bw-single-gradient-buffer steps early"
            )
        raise ValueError(f"{reason}; leave one of them out")


def _updates_alone(args: argparse.Namespace) -> None:
    """Refuse what stages that update independently exclude."""
    if args.clip_grad > 0:
        raise ValueError(
            f"{choice_of(args).flag} updates each stage by itself, so there is no global norm to "
            "clip with; add --clip-grad 0"
        )
    if args.fp16:
        raise ValueError(
            f"{choice_of(args).flag} updates each stage by itself, so an overflow elsewhere "
            "would be seen too late for --fp16; use --bf16"
        )
    if args.calculate_per_token_loss:
        raise ValueError(
            f"{choice_of(args).flag} updates each stage by itself, before the tokens of a batch are counted, so "
            "--calculate-per-token-loss has no divisor; leave it out"
        )
    if args.mtp_num_layers is not None and args.pipeline_model_parallel_size > 1:
        raise ValueError(
            f"{choice_of(args).flag} gives first and last stage different delays, so that the copies of the embedding "
            f"of --mtp-num-layers {args.mtp_num_layers} would part; use flush or 2bw"
        )
    if not args.untie_embeddings_and_output_weights and args.pipeline_model_parallel_size > 1:
        raise ValueError(
            f"{choice_of(args).flag} gives first and last stage different delays, so their "
            "embeddings cannot stay tied; add --untie-embeddings-and-output-weights"
        )


def loss(args: argparse.Namespace) -> None:
    if args.eval_iters and args.eval_interval is None:
        raise ValueError("--eval-iters needs --eval-interval")


def checkpoint(args: argparse.Namespace) -> list[str]:
    if args.ckpt_format != "torch_dist":
        raise ValueError(f"--ckpt-format {args.ckpt_format} is not supported; use torch_dist")
    if args.async_save and args.save is None:
        raise ValueError("--async-save needs --save")
    if args.use_mp_args_from_checkpoint_args and not args.use_checkpoint_args:
        raise ValueError("--use-mp-args-from-checkpoint-args needs --use-checkpoint-args")
    for name in ("use_checkpoint_args", "exit_on_missing_checkpoint", "finetune", "ckpt_step"):
        if getattr(args, name) not in (None, False) and args.load is None and args.pretrained_checkpoint is None:
            raise ValueError(f"--{name.replace('_', '-')} needs --load")
    if args.dist_ckpt_strictness in ("log_all", "return_unexpected", "return_all", "ignore_all"):
        return [
            f"--dist-ckpt-strictness {args.dist_ckpt_strictness}: a tensor that the checkpoint lacks is an error all "
            "the same, and nothing is returned"
        ]
    return []


def logging(args: argparse.Namespace) -> None:
    if args.wandb_project and not args.wandb_exp_name:
        raise ValueError("--wandb-project needs --wandb-exp-name")
    if args.profile and args.profile_step_end <= args.profile_step_start:
        raise ValueError(
            f"--profile-step-end {args.profile_step_end} must come after --profile-step-start {args.profile_step_start}"
        )
    if args.log_progress and args.save is None:
        raise ValueError("--log-progress needs --save")


def dry_run(args: argparse.Namespace) -> None:
    if args.dry_run is None:
        for name in ("dry_run_gpus_per_node", "dry_run_gpu", "dry_run_host_memory", "assume_packages", "dry_run_json"):
            if name in args.given:
                raise ValueError(f"--{name.replace('_', '-')} needs --dry-run, the number of GPUs of the job")
        return
    if args.dry_run_host_memory is not None and choice_of(args).residency is None:
        raise ValueError(
            f"--dry-run-host-memory {args.dry_run_host_memory:g} is for weights on the host, and "
            f"{choice_of(args).flag} has them on the device; use l2l, or leave it out"
        )
    if args.dry_run_gpu is not None:
        try:
            device_gib(args.dry_run_gpu)
        except ValueError as error:
            raise ValueError(f"--dry-run-gpu: {error}") from error


RULES = (
    paths,
    length,
    batches,
    relay,
    schedule,
    *optimizer.RULES,
    loss,
    checkpoint,
    logging,
    dry_run,
)
