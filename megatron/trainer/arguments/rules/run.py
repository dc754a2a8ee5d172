"""Rules about the run: batches and length, checkpoints, logging and dry runs."""

from megatron.planner.job.devices import device_gib
from megatron.trainer.arguments.flags.config import choice_of
from megatron.trainer.arguments.flags.model import CLASSIFIERS
from megatron.trainer.arguments.flags.specification import Arguments, name_of
from megatron.trainer.arguments.flags.values import BatchSizes, parse_steps
from megatron.trainer.arguments.rules.optimizer import learning_rate, optimizer
from megatron.trainer.arguments.rules.programs import num_samples as num_classified
from megatron.trainer.arguments.rules.schedule import relay, schedule

_PATHS = ("save", "load", "pretrained_checkpoint", "load_hf", "pipeline_timeline", "metrics_file", "tensorboard_dir",
          "data_cache_path", "dry_run_json")  # fmt: skip


def paths(args: Arguments) -> None:
    """Refuse an empty path, as an unset shell variable gives: it names no place, and the flag is not left out."""
    for name in _PATHS:
        if getattr(args, name) == "":
            raise ValueError(f"{name_of(name)} is empty; name a path or leave the flag out")


def length(args: Arguments) -> None:
    named = [name_of(name) for name in ("train_iters", "train_samples", "epochs") if getattr(args, name) is not None]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} exclude each other; keep one")
    if not named and not args.skip_train:
        epochs = "--epochs, " if args.architecture in CLASSIFIERS else ""
        raise ValueError(f"{epochs}--train-iters or --train-samples is needed")


def batches(args: Arguments) -> list[str]:
    """Set `global_batch_size`, `batch_sizes` and, from `--train-samples` or `--epochs`, `train_iters`; return notes."""
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


def _iterations_of_epochs(args: Arguments) -> int:
    """The number of batches in which the last epoch takes every sample; the last batch may exceed the epoch."""
    num_samples = args.epochs * num_classified(args, "train")
    whole = args.batch_sizes.iterations_for(num_samples)
    return whole + (args.batch_sizes.samples_after(whole) < num_samples)


def _batch_size_steps(args: Arguments) -> tuple[tuple[int, int], ...]:
    """Parse --step-batch-size-schedule, and set the global batch size to its last size."""
    if args.step_batch_size_schedule is None:
        return ()
    for name in ("rampup_batch_size", "decrease_batch_size_if_needed"):
        if getattr(args, name):
            raise ValueError(f"--step-batch-size-schedule and {name_of(name)} exclude each other; keep one")
    steps = parse_steps(args.step_batch_size_schedule, seq_length=args.seq_length)
    last = steps[-1][1]
    if args.global_batch_size not in (None, last):
        raise ValueError(
            f"--global-batch-size {args.global_batch_size} is not the last size of --step-batch-size-schedule, {last}; "
            "leave the former out"
        )
    args.global_batch_size = last
    return steps


def checkpoint(args: Arguments) -> list[str]:
    if args.ckpt_format != "torch_dist":
        raise ValueError(f"--ckpt-format {args.ckpt_format} is not supported; use torch_dist")
    if args.async_save and args.save is None:
        raise ValueError("--async-save needs --save")
    if args.use_mp_args_from_checkpoint_args and not args.use_checkpoint_args:
        raise ValueError("--use-mp-args-from-checkpoint-args needs --use-checkpoint-args")
    has_pretrained = args.pretrained_checkpoint is not None
    beside = "; of --pretrained-checkpoint the newest checkpoint is read, and no arguments" if has_pretrained else ""
    for name, is_met in (
        ("use_checkpoint_args", False), ("ckpt_step", False),
        ("exit_on_missing_checkpoint", has_pretrained), ("finetune", has_pretrained),
    ):  # fmt: skip
        if getattr(args, name) not in (None, False) and args.load is None and not is_met:
            raise ValueError(f"{name_of(name)} needs --load{beside}")
    if args.dist_ckpt_strictness in ("log_all", "return_unexpected", "return_all", "ignore_all"):
        return [
            f"--dist-ckpt-strictness {args.dist_ckpt_strictness}: a tensor that the checkpoint lacks is an error all "
            "the same, and nothing is returned"
        ]
    return []


def logging(args: Arguments) -> None:
    if args.wandb_project and not args.wandb_exp_name:
        raise ValueError("--wandb-project needs --wandb-exp-name")
    if args.profile and args.profile_step_end <= args.profile_step_start:
        raise ValueError(
            f"--profile-step-end {args.profile_step_end} must come after --profile-step-start {args.profile_step_start}"
        )
    if args.log_progress and args.save is None:
        raise ValueError("--log-progress needs --save")


def dry_run(args: Arguments) -> None:
    if args.dry_run is None:
        for name in ("dry_run_gpus_per_node", "dry_run_gpu", "dry_run_host_memory", "assume_packages", "dry_run_json"):
            if name in args.given:
                raise ValueError(f"{name_of(name)} needs --dry-run, the number of GPUs of the job")
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


RULES = (paths, length, batches, relay, schedule, optimizer, learning_rate, checkpoint, logging, dry_run)
