"""Flags of checkpoints, of what a run reports, and of a dry run."""

from dataclasses import dataclass

from megatron.trainer.arguments.flags.specification import Group, Role, negation, option, switch


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Checkpoint:
    """Saving and loading."""

    save: str | None = option(None, "Directory to save checkpoints in.", metavar="DIR")
    save_interval: int | None = option(
        None, "Iterations between checkpoints, with --save.", aliases=("--persistent-save-interval",)
    )
    load: str | None = option(
        None, "Directory to load the latest checkpoint from; an empty one starts anew.", metavar="DIR"
    )
    pretrained_checkpoint: str | None = option(
        None, "Start from these weights where --load holds nothing yet.", metavar="DIR"
    )
    load_hf: str | None = option(
        None,
        "Start from the weights of this Hugging Face model, a folder with config.json and safetensors, where --load "
        "holds nothing yet. The model's flags come from config.json; one that contradicts it is refused.",
        metavar="DIR",
    )
    ckpt_step: int | None = option(None, "Load this iteration instead of the latest.")
    no_save_optim: bool = switch("Save no optimizer state.")
    no_save_rng: bool = switch("Save no random state.")
    no_load_optim: bool = switch("Load no optimizer state.")
    no_load_rng: bool = switch("Load no random state.")
    finetune: bool = switch("Load only weights and start at iteration 0.")
    use_checkpoint_args: bool = switch("Take the model's shape from the checkpoint.")
    use_mp_args_from_checkpoint_args: bool = switch(
        "With --use-checkpoint-args: also take the tensor and the pipeline parallel size, and the cut into stages.",
        roles=Role.LOCATION | Role.SHORT_RUN | Role.CONFIGURATION,
    )
    exit_on_missing_checkpoint: bool = switch("End if --load holds no checkpoint.")
    ckpt_format: str = option("torch_dist", "Format of checkpoints.", choices=("torch_dist", "torch", "zarr"))
    dist_ckpt_strictness: str = option(
        "assume_ok_unexpected",
        "What becomes of weights that a checkpoint has beyond the model: left out and named in the log; "
        "ignore_..., return_...: without a word; raise_...: an error. What a checkpoint lacks is always an error.",
        choices=(
            "assume_ok_unexpected",
            "log_unexpected",
            "log_all",
            "raise_unexpected",
            "raise_all",
            "return_unexpected",
            "return_all",
            "ignore_all",
        ),
    )
    async_save: bool = switch("Write checkpoints beside training.")
    use_dist_ckpt: bool = switch("Accepted: checkpoints are always distributed ones.")
    auto_detect_ckpt_format: bool = switch("Accepted: torch_dist is the only format.")
    ckpt_fully_parallel_save_deprecated: bool = switch("Accepted: on by default.", name="--ckpt-fully-parallel-save")
    ckpt_fully_parallel_save: bool = negation(
        "--no-ckpt-fully-parallel-save",
        "The first data parallel rank writes everything.",
        aliases=("--disable-ckpt-fully-parallel-save",),
    )
    ckpt_fully_parallel_load: bool = switch("Each data parallel rank reads a share and passes it on.")
    ckpt_assume_constant_structure: bool = switch("Accepted without effect: each save makes a plan of its own.")


CHECKPOINT = Group.of(Checkpoint, "checkpoint", Role.LOCATION | Role.SHORT_RUN)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Logging:
    """What a run prints and records."""

    log_interval: int = option(100, "Iterations between log lines.")
    log_throughput: bool = switch("Print TFLOP/s per GPU.")
    log_saved_activations: bool = switch(
        "Count the bytes of saved activations: peak per pipeline rank in the log line and the metrics file; where "
        "the schedule splits backwards, also what is kept between I and W. "
        "Schedules that move activations always do; others then run forwards under saved-tensor hooks."
    )
    log_progress: bool = switch("Append progress to progress.txt in --save.")
    logging_level: int | None = option(None, "Level of Python's logging (10 debug, 20 info, 30 warning).")
    metrics_file: str | None = option(
        None,
        "JSON lines with full-precision values per iteration and evaluation; a resumed run appends. The last rank "
        "writes it, and peak_memory_bytes is its own; saved_activation_bytes, deferred_bytes (between I and W) "
        "and, on CUDA, the allocator's peak_allocated_bytes are lists by pipeline rank, of the fullest tensor and "
        "data rank; so are device_peak_bytes and host_peak_bytes of --pipeline-schedule l2l. "
        "On a full disk training goes on with a warning, and the lines are written once there is room.",
        metavar="FILE",
    )
    tensorboard_dir: str | None = option(
        None,
        "Directory of TensorBoard's event files. Without the package tensorboard, and on a full disk, the run "
        "warns once and goes on.",
        metavar="DIR",
    )
    tensorboard_log_interval: int = option(1, "Iterations between TensorBoard values.")
    tensorboard_queue_size: int = option(1000, "Pending events before TensorBoard writes.")
    log_timers_to_tensorboard: bool = switch("Also record iteration times.")
    log_loss_scale_to_tensorboard: bool = negation(
        "--no-log-loss-scale-to-tensorboard",
        "No loss scale in TensorBoard.",
        aliases=("--disable-log-loss-scale-to-tensorboard",),
    )
    log_learning_rate_to_tensorboard: bool = negation(
        "--no-log-learnig-rate-to-tensorboard",
        "No learning rate in TensorBoard.",
        aliases=("--no-log-learning-rate-to-tensorboard",),
    )
    log_validation_ppl_to_tensorboard: bool = switch("Also record validation perplexity.")
    log_memory_to_tensorboard: bool = switch(
        "Also record the last rank's peak memory, and the most saved activations of a rank."
    )
    log_world_size_to_tensorboard: bool = switch("Also record the world size.")
    timing_log_level: int = option(
        0, "Accepted without effect; use --pipeline-timeline for where time goes.", choices=(0, 1, 2)
    )
    timing_log_option: str = option(
        "minmax", "Accepted without effect, as --timing-log-level.", choices=("max", "minmax", "all")
    )
    wandb_project: str = option(
        "",
        "Weights & Biases project; empty: off. Without the package wandb, and where it fails, the run warns once "
        "and goes on.",
    )
    wandb_entity: str = option("", "Weights & Biases entity.")
    wandb_exp_name: str = option("", "Weights & Biases name of the run.")
    wandb_save_dir: str = option("", "Where Weights & Biases keeps local files.", metavar="DIR")
    profile: bool = switch("Profile the iterations from --profile-step-start to --profile-step-end.")
    use_pytorch_profiler: bool = switch(
        "With --profile: PyTorch's profiler (trace into --tensorboard-dir) instead of nsys ranges."
    )
    profile_step_start: int = option(10, "First iteration to profile.")
    profile_step_end: int = option(12, "Iteration at which profiling ends.")
    profile_ranks: list[int] = option([0], "Ranks to profile.", nargs="+")


LOGGING = Group.of(Logging, "logging", Role.LOCATION | Role.SHORT_RUN)


# --- a dry run --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, init=False, repr=False, eq=False)
class DryRunFlags:
    """Check a command line for a cluster on any machine: one process, no launcher, no GPU. See cluster.md."""

    dry_run: int | None = option(
        None,
        "Check the flags for a job of this many GPUs, build and prove its program, estimate its memory, print its "
        "rank map, and exit: 0, or 1 with the reason. Data, tokenizer and checkpoint may be missing.",
        metavar="GPUS",
    )
    dry_run_gpus_per_node: int = option(8, "With --dry-run: GPUs of a node, where no --rank-topology says it.")
    dry_run_gpu: str | None = option(
        None,
        "With --dry-run: the GPU, as A100-80, H100, V100-16, or its memory in GiB; a job that does not fit is refused.",
        metavar="GPU",
    )
    dry_run_host_memory: float | None = option(
        None,
        "With --dry-run and l2l: GiB of a node's memory for training; a job that does not fit is refused, and the "
        "largest model of its shape that would fit is said.",
        metavar="GIB",
    )
    assume_packages: list[str] | None = option(
        None,
        "With --dry-run: the packages of the job's machines, NAME or NAME==VERSION, of transformer_engine, apex and "
        "deep_ep; none for none of them. Without the flag all of them are taken as there, in their newest versions.",
        nargs="+",
        metavar="PACKAGE",
    )
    dry_run_json: str | None = option(None, "With --dry-run: write everything to this file, too.", metavar="FILE")


DRY_RUN = Group.of(DryRunFlags, "dry run", Role.CONFIGURATION)
