"""Flags about a run's input and output (data, tokenizer, checkpoints and reports), and flags of a dry run."""

from dataclasses import dataclass
from typing import Any

from megatron.trainer.arguments.flags.specification import Group, Role, negation, option, switch
from megatron.trainer.files.conversations import PROMPT_FORMATS

# --- data and tokenizer -----------------------------------------------------------------------------------------------


TOKENIZER_TYPES = (
    "GPT2BPETokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer",
    "HuggingFaceTokenizer", "TikTokenizer", "ByteLevelTokenizer", "NullTokenizer", "BertWordPieceLowerCase",
    "BertWordPieceCase", "PretrainedFromHF", "SFTTokenizer",
)  # fmt: skip
_SAMPLES = Role.LOCATION | Role.SOURCE | Role.ORDER


def _only_for(split: str, alias: str, roles: Role) -> Any:
    text = f"Like --data-path, for {split} only."
    return option(None, text, aliases=(alias,), nargs="*", metavar="PREFIX", roles=roles)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Data:
    """Where samples come from."""

    data_path: list[str] | None = option(
        None,
        "Prefix of a .bin/.idx pair, or WEIGHT PREFIX WEIGHT PREFIX ... for a blend. Of "
        "pretrain_vision_classify.py and finetune_bert.py: the data for training, for validation and for test, as "
        "many as there are.",
        nargs="*",
        metavar="PREFIX",
        roles=_SAMPLES,
    )
    split: str | None = option(
        None,
        "Shares of training, validation and test in --data-path. Default: 969, 30, 1.",
        roles=Role.LOCATION | Role.ORDER,
    )
    train_data_path: list[str] | None = _only_for("training", "--train-data", _SAMPLES)
    valid_data_path: list[str] | None = _only_for("validation", "--valid-data", Role.LOCATION | Role.SOURCE)
    test_data_path: list[str] | None = _only_for("test", "--test-data", Role.LOCATION | Role.SOURCE)
    data_args_path: str | None = option(
        None, "File that holds the value of --data-path.", metavar="FILE", roles=_SAMPLES
    )
    per_split_data_args_path: str | None = option(
        None, "JSON file with keys train, valid and test, each a value of --data-path.", metavar="FILE", roles=_SAMPLES
    )
    data_cache_path: str | None = option(
        None, "Where sample indices are kept. Default: beside the data.", metavar="DIR"
    )
    mock_data: bool = switch("Synthetic samples, no files.", roles=_SAMPLES)
    num_workers: int = option(2, "Processes that load samples on each rank that needs them.")
    num_dataset_builder_threads: int = option(1, "Threads that build datasets of a blend.")
    dataloader_type: str = option(
        "single",
        "single: in order, once. cyclic: refused; samples are already shuffled by the dataset.",
        choices=("single", "cyclic", "external"),
    )
    reset_position_ids: bool = switch("Positions start at 0 after each end-of-document token.")
    reset_attention_mask: bool = switch("No attention across end-of-document tokens.")
    eod_mask_loss: bool = switch(
        "No loss on end-of-document tokens. As in Megatron-LM, the reported loss is the mean over tokens, and the "
        "trained one that over microbatches."
    )
    create_attention_mask_in_dataloader: bool = negation(
        "--no-create-attention-mask-in-dataloader", "Leave the causal mask to the attention."
    )


DATA = Group.of(Data, "data", Role.LOCATION)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Conversations:
    """Training on answers (docs/conversations.md)."""

    sft: bool = switch(
        "Data are JSON lines of conversations. Several share a sequence and do not see each other, and only answers "
        "have a loss."
    )
    sft_tokenizer_prompt_format: str = option(
        "nemotron-h-aligned", "How a conversation is written.", choices=tuple(PROMPT_FORMATS)
    )


CONVERSATIONS = Group.of(Conversations, "conversations", Role.ORDER)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Tokenizer:
    """Text to token ids."""

    tokenizer_type: str | None = option(
        None,
        "Kind of tokenizer. Default with --vocab-file and --merge-file: GPT2BPETokenizer; of pretrain_bert.py: "
        "BertWordPieceLowerCase. PretrainedFromHF is MindSpeed-LLM's name of HuggingFaceTokenizer, and SFTTokenizer "
        "Megatron-LM's beside --sft.",
        choices=TOKENIZER_TYPES,
    )
    tokenizer_model: str | None = option(
        None, "Model file or directory of the tokenizer.", aliases=("--tokenizer-name-or-path",), metavar="PATH"
    )
    patch_tokenizer_type: str | None = option(
        None, "Pai-Megatron-Patch's kind of tokenizer: without --tokenizer-type a HuggingFaceTokenizer of --load."
    )
    vocab_file: str | None = option(None, "GPT-2's vocabulary (JSON), or WordPiece's (a token a line).", metavar="FILE")
    merge_file: str | None = option(None, "GPT-2's merges.", metavar="FILE")
    vocab_size: int | None = option(
        None,
        "Vocabulary before padding: needed by NullTokenizer, a limit for TikTokenizer, "
        "otherwise the least size of the embedding.",
        roles=Role.SAVED,
    )
    vocab_extra_ids: int = option(0, "Extra ids after the vocabulary.", roles=Role.SAVED)
    tiktoken_pattern: str | None = option(None, "How TikTokenizer splits text.", choices=("v1", "v2"))
    tiktoken_num_special_tokens: int = option(1000, "Special tokens of TikTokenizer.", roles=Role.SAVED)
    tiktoken_special_tokens: list[str] | None = option(None, "Names of TikTokenizer's special tokens.", nargs="+")


TOKENIZER = Group.of(Tokenizer, "tokenizer", Role.LOCATION | Role.SAVED)


# --- checkpoints and reports ------------------------------------------------------------------------------------------


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
        "data rank; so are device_peak_bytes and host_peak_bytes of --pipeline-schedule l2l. With "
        "--go-on-without-lost-ranks there is an object for each loss. "
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
