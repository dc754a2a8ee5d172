"""Flags of checkpoints, of what a run reports, and of a dry run."""

from megatron.trainer.arguments.flags.specification import Group, Role, integer, negation, number, option, switch

CHECKPOINT = Group(
    "checkpoint",
    "Saving and loading.",
    (
        option("--save", str, None, "Directory to save checkpoints in.", metavar="DIR"),
        option("--save-interval", integer, None, "Iterations between checkpoints, with --save."),
        option(
            "--load",
            str,
            None,
            "Directory to load the latest checkpoint from; an empty one starts anew.",
            metavar="DIR",
        ),
        option(
            "--pretrained-checkpoint",
            str,
            None,
            "Start from these weights where --load holds nothing yet.",
            metavar="DIR",
        ),
        option("--ckpt-step", integer, None, "Load this iteration instead of the latest."),
        switch("--no-save-optim", "Save no optimizer state."),
        switch("--no-save-rng", "Save no random state."),
        switch("--no-load-optim", "Load no optimizer state."),
        switch("--no-load-rng", "Load no random state."),
        switch("--finetune", "Load only weights and start at iteration 0."),
        switch("--use-checkpoint-args", "Take the model's shape from the checkpoint."),
        switch(
            "--use-mp-args-from-checkpoint-args",
            "With --use-checkpoint-args: also take the tensor and the pipeline parallel size, and the cut into stages.",
            roles=Role.LOCATION | Role.SHORT_RUN | Role.CONFIGURATION,
        ),
        switch("--exit-on-missing-checkpoint", "End if --load holds no checkpoint."),
        option("--ckpt-format", str, "torch_dist", "Format of checkpoints.", choices=("torch_dist", "torch", "zarr")),
        option(
            "--dist-ckpt-strictness",
            str,
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
        ),
        switch("--async-save", "Write checkpoints beside training."),
        switch("--use-dist-ckpt", "Accepted: checkpoints are always distributed ones."),
        switch("--auto-detect-ckpt-format", "Accepted: torch_dist is the only format."),
        switch("--ckpt-fully-parallel-save", "Accepted: on by default.", dest="ckpt_fully_parallel_save_deprecated"),
        negation(
            "--no-ckpt-fully-parallel-save",
            "ckpt_fully_parallel_save",
            "The first data parallel rank writes everything.",
        ),
        switch("--ckpt-fully-parallel-load", "Each data parallel rank reads a share and passes it on."),
        switch("--ckpt-assume-constant-structure", "Accepted without effect: each save makes a plan of its own."),
    ),
    Role.LOCATION | Role.SHORT_RUN,
)

LOGGING = Group(
    "logging",
    "What a run prints and records.",
    (
        option("--log-interval", integer, 100, "Iterations between log lines."),
        switch("--log-throughput", "Print TFLOP/s per GPU."),
        switch(
            "--log-saved-activations",
            "Count the bytes of saved activations: peak per pipeline rank in the log line and the metrics file; where "
            "the schedule splits backwards, also what is kept between I and W. "
            "Schedules that move activations always do; others then run forwards under saved-tensor hooks.",
        ),
        switch("--log-progress", "Append progress to progress.txt in --save."),
        option("--logging-level", integer, None, "Level of Python's logging (10 debug, 20 info, 30 warning)."),
        option(
            "--metrics-file",
            str,
            None,
            "JSON lines with full-precision values per iteration and evaluation; a resumed run appends. The last rank "
            "writes it, and peak_memory_bytes is its own; saved_activation_bytes, deferred_bytes (between I and W) "
            "and, on CUDA, the allocator's peak_allocated_bytes are lists by pipeline rank, of the fullest tensor and "
            "data rank; so are device_peak_bytes and host_peak_bytes of --pipeline-schedule l2l. "
            "On a full disk training goes on with a warning, and the lines are written once there is room.",
            metavar="FILE",
        ),
        option(
            "--tensorboard-dir",
            str,
            None,
            "Directory of TensorBoard's event files. Without the package tensorboard, and on a full disk, the run "
            "warns once and goes on.",
            metavar="DIR",
        ),
        option("--tensorboard-log-interval", integer, 1, "Iterations between TensorBoard values."),
        option("--tensorboard-queue-size", integer, 1000, "Pending events before TensorBoard writes."),
        switch("--log-timers-to-tensorboard", "Also record iteration times."),
        negation(
            "--no-log-loss-scale-to-tensorboard", "log_loss_scale_to_tensorboard", "No loss scale in TensorBoard."
        ),
        negation(
            "--no-log-learnig-rate-to-tensorboard",
            "log_learning_rate_to_tensorboard",
            "No learning rate in TensorBoard.",
            aliases=("--no-log-learning-rate-to-tensorboard",),
        ),
        switch("--log-validation-ppl-to-tensorboard", "Also record validation perplexity."),
        switch(
            "--log-memory-to-tensorboard",
            "Also record the last rank's peak memory, and the most saved activations of a rank.",
        ),
        switch("--log-world-size-to-tensorboard", "Also record the world size."),
        option(
            "--timing-log-level",
            integer,
            0,
            "Accepted without effect; use --pipeline-timeline for where time goes.",
            choices=(0, 1, 2),
        ),
        option(
            "--timing-log-option",
            str,
            "minmax",
            "Accepted without effect, as --timing-log-level.",
            choices=("max", "minmax", "all"),
        ),
        option(
            "--wandb-project",
            str,
            "",
            "Weights & Biases project; empty: off. Without the package wandb, and where it fails, the run warns once "
            "and goes on.",
        ),
        option("--wandb-entity", str, "", "Weights & Biases entity."),
        option("--wandb-exp-name", str, "", "Weights & Biases name of the run."),
        option("--wandb-save-dir", str, "", "Where Weights & Biases keeps local files.", metavar="DIR"),
        switch("--profile", "Profile the iterations from --profile-step-start to --profile-step-end."),
        switch(
            "--use-pytorch-profiler",
            "With --profile: PyTorch's profiler (trace into --tensorboard-dir) instead of nsys ranges.",
        ),
        option("--profile-step-start", integer, 10, "First iteration to profile."),
        option("--profile-step-end", integer, 12, "Iteration at which profiling ends."),
        option("--profile-ranks", integer, [0], "Ranks to profile.", nargs="+"),
    ),
    Role.LOCATION | Role.SHORT_RUN,
)


# --- a dry run --------------------------------------------------------------------------------------------------------

DRY_RUN = Group(
    "dry run",
    "Check a command line for a cluster on any machine: one process, no launcher, no GPU. See cluster.md.",
    (
        option(
            "--dry-run",
            integer,
            None,
            "Check the flags for a job of this many GPUs, build and prove its program, estimate its memory, print its "
            "rank map, and exit: 0, or 1 with the reason. Data, tokenizer and checkpoint may be missing.",
            metavar="GPUS",
        ),
        option(
            "--dry-run-gpus-per-node",
            integer,
            8,
            "With --dry-run: GPUs of a node, where no --rank-topology says it.",
        ),
        option(
            "--dry-run-gpu",
            str,
            None,
            "With --dry-run: the GPU, as A100-80, H100, V100-16, or its memory in GiB; a job that does not fit is "
            "refused.",
            metavar="GPU",
        ),
        option(
            "--dry-run-host-memory",
            number,
            None,
            "With --dry-run and l2l: GiB of a node's memory for training; a job that does not fit is refused, and the "
            "largest model of its shape that would fit is said.",
            metavar="GIB",
        ),
        option("--dry-run-json", str, None, "With --dry-run: write everything to this file, too.", metavar="FILE"),
    ),
    Role.CONFIGURATION,
)
