"""`finetune.py`'s command line: the flags of Hugging Face's example scripts, and this project's for the pipeline.

This module imports no torch, so a wrong command line is refused at once. Therefore the parser is not transformers'
`HfArgumentParser`, whose `TrainingArguments` also have a hundred flags that would have no effect here.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron.documents import counted
from megatron.documents.flag_files import HEAD, FlagFileParser, in_one, with_configuration
from megatron.documents.flag_types import both_spellings, count, count_from_0, decay, part, real, scale, steps, within
from megatron.finetuning import best, freezing_arguments, trackers
from megatron.finetuning.adapter_arguments import add_adapters, add_merge, validate_adapter
from megatron.finetuning.data.task_arguments import add_task, validate_task
from megatron.finetuning.generation_arguments import add_generation, validate_generation
from megatron.finetuning.relay_arguments import RELAY, add_relay, validate_relay
from megatron.finetuning.row_arguments import add_rows, validate_rows
from megatron.pipeline.runtime.failure.errors import environment_ranks

SCHEDULES = ("ftpipe", "flush", "gpipe", "2bw", "pipedream", RELAY)
OPTIMIZERS = ("adamw", "adamw_torch_fused", "adam", "sgd", "adafactor")
SCHEDULERS = ("linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt")
ALONE = ("ftpipe", "pipedream")
"""Schedules under which each stage steps by itself, so that a step cannot depend on all stages."""

LOSSES = {"failure_timeout": 10.0, "minimum_speed": 0.0}
"""Flags of --go_on_without_lost_ranks, with the values of pretraining."""

RECOMPUTING = ("ftpipe", RELAY)
"""Schedules that always recompute activations."""

SOFTENING = ("weight_prediction", "gap_aware", "provisional_steps")
"""Flags that soften the staleness of ftpipe's weights."""

DTYPES = ("float32", "bfloat16")
STRATEGIES = ("no", "steps", "epoch")
SAVE_STEPS = 500
"""Batches between two checkpoints if --save_strategy steps is given without --save_steps, as in transformers."""


def parse_args(argv: Sequence[str] | None = None, prog: str = "finetune.py") -> argparse.Namespace:
    """Read the command line and make all checks that need no model. Raises ValueError for a wrong command line."""
    parser = _parser(prog)
    args = parser.parse_args(with_configuration(sys.argv[1:] if argv is None else argv, parser))
    validate(args)
    return args


def validate(args: argparse.Namespace) -> None:
    """Check the flags, fill in the flags that follow from others, and put sentences for the user into `args.notes`.

    Raises ValueError, with the remedy, for flags that contradict each other.
    """
    args.notes, args.resumed_from = [], None
    if args.config is not None:
        args.notes.append(f"flags of {args.config}, and over them those of the command line")
    if args.gradient_checkpointing and args.no_recompute:
        raise ValueError(
            "--gradient_checkpointing recomputes activations, and --no_recompute keeps them; leave one out"
        )
    if args.no_recompute and args.pipeline_schedule == "ftpipe":
        raise ValueError(
            "--no_recompute: ftpipe recomputes, since its backwards use newer weights than its forwards; leave it out, "
            "or give --pipeline_schedule flush"
        )
    if args.gradient_checkpointing is False:  # also the default of transformers, which files of flags spell out
        args.no_recompute |= args.pipeline_schedule not in RECOMPUTING
        if args.pipeline_schedule in RECOMPUTING:
            args.notes.append(f"--gradient_checkpointing false has no effect: {args.pipeline_schedule} recomputes")
    if args.pipeline_schedule in ALONE:
        if args.max_grad_norm:
            raise ValueError(
                f"--max_grad_norm {args.max_grad_norm:g} needs the norm of all stages before any of them steps, and "
                f"under {args.pipeline_schedule} each steps alone; give --max_grad_norm 0, or --pipeline_schedule flush"
            )
        args.max_grad_norm = 0.0
    elif args.max_grad_norm is None:
        args.max_grad_norm = 1.0
    validate_relay(args)
    if args.pipeline_schedule == "pipedream" and args.gradient_accumulation_steps > 1:
        raise ValueError(
            f"pipedream steps after each microbatch, and --gradient_accumulation_steps is "
            f"{args.gradient_accumulation_steps}; give 1, or --pipeline_schedule ftpipe"
        )
    for name in SOFTENING:
        if getattr(args, name) and args.pipeline_schedule != "ftpipe":
            raise ValueError(
                f"--{name} softens the staleness of ftpipe's weights, and --pipeline_schedule is "
                f"{args.pipeline_schedule}; leave it out"
            )
    for name in ("weight_prediction", "gap_aware"):
        if args.provisional_steps and getattr(args, name):
            raise ValueError(
                f"--provisional_steps has forwards at weights of its own, and --{name} has others; leave one out"
            )
    if args.provisional_steps and args.gradient_accumulation_steps == 1:
        raise ValueError(
            "--provisional_steps needs gradients that no step has taken, and with --gradient_accumulation_steps 1 each "
            "is stepped at once; give 2 or more, or leave it out"
        )
    if args.provisional_steps and args.data_parallel_size > 1:
        raise ValueError(
            f"--provisional_steps takes the gradients so far, of which --data_parallel_size {args.data_parallel_size} "
            "replicas have each a part; leave one out, or give --weight_prediction or --gap_aware"
        )
    if args.weight_prediction and args.optim == "adafactor":
        raise ValueError("--weight_prediction predicts steps of sgd, adam and adamw, not of adafactor; leave one out")
    settle_precision(args)
    validate_adapter(args)
    _settle_loss_scale(args)
    if args.weight_prediction and args.bf16:
        raise ValueError(
            "--weight_prediction needs the optimizer's state of the weights, and with --bf16 that is of FP32 masters; "
            "leave one out, or give --gap_aware or --provisional_steps, which support masters"
        )
    size = args.per_device_train_batch_size
    if args.per_device_eval_batch_size not in (None, size):
        raise ValueError(
            f"--per_device_eval_batch_size {args.per_device_eval_batch_size} differs from that of training, {size}, "
            "and stages exchange tensors of one shape; leave it out"
        )
    if not (args.do_train or args.do_eval or args.dry_run):
        args.do_train, args.do_eval = True, args.validation_file is not None
    _complete_intervals(args)
    best.settle(args)
    freezing_arguments.settle(args)
    if args.train_file is None and (args.do_train or not args.do_eval):  # a dry run looks at data, too
        raise ValueError("there is nothing to train on: give --train_file")
    if args.do_eval and args.validation_file is None:
        raise ValueError("--do_eval needs --validation_file")
    if args.do_train and args.output_dir is None:
        raise ValueError("there is nowhere to write the model: give --output_dir")
    trackers.settle(args)
    validate_task(args)
    validate_generation(args)
    if args.packing and not (args.task == "chat" or (args.task == "causal-lm" and args.no_group_texts)):
        otherwise = "give --no_group_texts" if args.task == "causal-lm" else "leave it out"
        raise ValueError(
            "--packing puts several samples into a row for --task chat and for causal-lm with --no_group_texts, and "
            f"--task is {args.task}; {otherwise}"
        )
    validate_rows(args)
    _validate_losses(args)
    args.rank, args.world_size, _ = environment_ranks()
    if args.devices is not None and args.devices != args.world_size and not args.dry_run:
        raise ValueError(
            f"--devices {args.devices} is for --dry_run; a run has as many as processes, {args.world_size}"
        )
    args.devices = args.devices or args.world_size
    if args.devices % args.data_parallel_size:
        raise ValueError(
            f"{counted(args.devices, 'device')} cannot be {args.data_parallel_size} equal pipelines; give a "
            "--data_parallel_size that divides their number"
        )


_CANNOT_GO_ON = (
    (lambda args: args.data_parallel_size < 2, "one replica", "leaves nobody with the weights of a lost rank: add "
     "--data_parallel_size 2"),
    (lambda args: args.pipeline_schedule in ALONE, "--pipeline_schedule ftpipe or pipedream",
     "steps each stage by itself, so that no batch can be repeated: add --pipeline_schedule flush or 2bw"),
    (lambda args: args.pipeline_schedule == RELAY, f"--pipeline_schedule {RELAY}",
     "steps weights on the host in place, which a loss would leave half done: add --pipeline_schedule flush"),
    (lambda args: args.freeze_training, "--freeze_training", "changes its stages while it trains"),
    (lambda args: not (args.do_train or args.dry_run), "nothing to train", "has no batch to repeat"),
)  # fmt: skip
"""Whether the row applies, the feature in question, and why a run with this feature cannot go on without a rank."""


def _validate_losses(args: argparse.Namespace) -> None:
    """Raise ValueError for flags that exclude a run that goes on without lost ranks."""
    for name, default in LOSSES.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif not args.go_on_without_lost_ranks:
            raise ValueError(f"--{name} is for --go_on_without_lost_ranks; give both or neither")
    for applies, what, why in _CANNOT_GO_ON if args.go_on_without_lost_ranks else ():
        if applies(args):
            raise ValueError(f"--go_on_without_lost_ranks: a run with {what} {why}; or leave one of the two out")


def require_gloo(args: argparse.Namespace) -> None:
    """Raise ValueError if a run that goes on without lost ranks has another backend than gloo on this device."""
    if args.go_on_without_lost_ranks and args.distributed_backend != "gloo":
        raise ValueError(
            f"--go_on_without_lost_ranks: a run with --distributed_backend {args.distributed_backend} has not been "
            "shown to end the waits of its ranks: give --distributed_backend gloo, or leave one of the two out"
        )


def _complete_intervals(args: argparse.Namespace) -> None:
    """Fill in the strategies of evaluation and saving and their numbers of batches; a strategy turns on `do_eval`.

    The flags mean what they mean to transformers' trainer; a number of batches without a strategy means `steps`.
    `args.notes` gets a sentence for each number that has no effect.

    Raises ValueError for flags that contradict each other.
    """
    if args.eval_each_epoch and args.eval_strategy not in (None, "epoch"):
        raise ValueError(f"--eval_each_epoch contradicts --eval_strategy {args.eval_strategy}; leave one out")
    if args.eval_each_epoch:
        args.eval_strategy = "epoch"
    asked = f"--eval_strategy {args.eval_strategy}" if args.eval_strategy else "--eval_steps"
    for name, default in (("eval", args.logging_steps), ("save", SAVE_STEPS)):
        given, number = getattr(args, f"{name}_strategy"), getattr(args, f"{name}_steps")
        word = given or ("steps" if number else "no")
        if number and word != "steps":
            args.notes.append(f"--{name}_steps {number:g} means nothing with --{name}_strategy {word}")
        if word == "steps" and (number is None or (number == 0 and name == "eval")):
            number = default
        setattr(args, f"{name}_strategy", word)
        setattr(args, f"{name}_steps", number if word == "steps" else 0)
    if args.eval_strategy != "no" and args.do_train and not args.do_eval:
        if args.validation_file is None:
            raise ValueError(f"{asked} has nothing to evaluate; give --validation_file, or leave it out")
        args.do_eval = True


def changed(args: argparse.Namespace, **values: object) -> argparse.Namespace:
    """A copy of the arguments with other values; `args` stay as they are."""
    return argparse.Namespace(**{**vars(args), **values})


def rows_of_batch(args: argparse.Namespace) -> int:
    """The number of samples of a batch, over all replicas."""
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * args.data_parallel_size


def settled_intervals(args: argparse.Namespace, *, num_steps: int, steps_per_epoch: int) -> argparse.Namespace:
    """The arguments with `eval_steps` and `save_steps` as whole numbers of batches; 0 means only at the end."""
    settled = {}
    for name in ("eval", "save"):
        number = getattr(args, f"{name}_steps")
        if getattr(args, f"{name}_strategy") == "epoch":
            number = steps_per_epoch
        elif 0 < number < 1:
            number = math.ceil(number * num_steps)
        settled[f"{name}_steps"] = int(number)
    args = changed(args, **settled)
    best.require_evaluated(args)
    return args


def settle_precision(args: argparse.Namespace) -> None:
    """Set `args.dtype` to the dtype of the weights. Raises ValueError if flags of precision contradict each other."""
    if args.bf16 and args.fp16:
        raise ValueError("--bf16 has weights in bfloat16, and --fp16 in float16; leave one out")
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if getattr(args, name) and args.dtype not in (None, dtype):
            raise ValueError(f"--{name} has weights in {dtype}, and --dtype is {args.dtype}; leave one out")
    args.dtype = args.dtype or ("bfloat16" if args.bf16 else "float16" if args.fp16 else "float32")


def has_masters(args: argparse.Namespace) -> bool:
    """Whether the optimizer steps FP32 masters of the weights."""
    return args.bf16 or args.fp16


LOSS_SCALE = {
    "initial_loss_scale": 65536.0, "loss_scale_window": 2000, "loss_scale_growth": 2.0, "loss_scale_backoff": 0.5,
    "min_loss_scale": 1.0,
}  # fmt: skip
"""Flags of the loss scale of --fp16, with the values of torch.amp.GradScaler."""


def _settle_loss_scale(args: argparse.Namespace) -> None:
    """Fill in the flags of the loss scale. Raises ValueError if stages step alone, or no scale is possible."""
    if args.fp16 and args.pipeline_schedule in ALONE:
        raise ValueError(
            f"--fp16 has a loss scale, and whether gradients overflow with it has to be known before any stage steps; "
            f"under {args.pipeline_schedule} each steps alone; give --bf16, or --pipeline_schedule flush"
        )
    for name, default in LOSS_SCALE.items():
        given = getattr(args, name)
        if given is not None and not args.fp16:
            args.notes.append(f"--{name} {given:g} means nothing without --fp16")
        setattr(args, name, default if given is None else given)
    if args.min_loss_scale > args.initial_loss_scale:
        raise ValueError(
            f"--min_loss_scale {args.min_loss_scale:g} is above --initial_loss_scale {args.initial_loss_scale:g}; give "
            "less"
        )


class _Parser(FlagFileParser):
    def end(self, mistakes: list[str]) -> NoReturn:
        raise ValueError(in_one(self.with_usage(mistakes), HEAD))


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog, allow_abbrev=False, description="Fine-tune a Hugging Face model through a pipeline of stages.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    _add_model_and_data(parser.add_argument_group("model and data"))
    _add_training(parser.add_argument_group("training"))
    add_adapters(parser.add_argument_group("adapters"))
    add_generation(both_spellings(parser.add_argument_group("generation")))
    _add_pipeline(parser.add_argument_group("pipeline"))
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_model_and_data(group) -> None:
    add = both_spellings(group)
    add("--config", metavar="FILE", help="YAML file of flags, which may also be the first word")
    add("--model_name_or_path", required=True, metavar="FOLDER", help="a folder with config, weights and tokenizer")
    add_data(group, required=True)


def add_data(group, *, required: bool) -> None:
    """Add the flags of the task and its data."""
    add = both_spellings(group)
    add("--task", choices=tuple(best.METRICS), required=required, help="the task to learn")
    add("--train_file", metavar="FILE", help="JSONL, CSV (also .gz, .bz2, .xz) or parquet")
    add("--validation_file", metavar="FILE", help="the same for evaluations")
    add("--text_column", help="column of the text; none: the first known name that the file has")
    add("--text_pair_column", help="column of a second text")
    add("--summary_column", "--target_column", dest="target_column", help="column of the target text")
    add("--label_column", help="column of the label")
    add("--image_column", help="column of the image")
    add("--question_column", help="column of the question")
    add("--context_column", help="column of the context")
    add("--answers_column", help="column of the answers")
    add("--messages_column", help="column of the messages of a conversation (chat, image-text-to-text)")
    add("--source_prefix", default="", help="put before each text (T5)")
    add("--max_seq_length", "--max_source_length", "--block_size", dest="max_seq_length", type=count, default=128,
        help="tokens of a sequence, to which all are padded or cut")  # fmt: skip
    add("--max_target_length", type=count, default=128, help="tokens of a target (text-to-text)")
    add("--doc_stride", type=count_from_0, default=64, help="tokens that two windows of a long context share")
    add("--no_group_texts", action="store_true", help="one text a row, instead of rows cut of all (causal-lm)")
    add("--packing", action="store_true", help="several samples a row, each by itself (chat, causal-lm without groups)")
    add("--chat_template", metavar="FILE", help="a template in place of the model's (chat, dpo, image-text-to-text)")
    add("--train_on_prompt", action="store_true",
        help="all tokens count in the loss, not only answers' (chat, image-text-to-text)")  # fmt: skip
    add_task(add)
    add_rows(add)
    add("--max_train_samples", type=count, help="number of the file's first samples to use")
    add("--max_eval_samples", type=count, help="number of the file's first samples to use")


def add_microbatch(group) -> None:
    """Add the flags that decide the memory of a microbatch and of a parameter."""
    add = both_spellings(group)
    add("--per_device_train_batch_size", type=count, default=8, help="samples of a microbatch")
    add("--gradient_accumulation_steps", type=count, default=1, help="microbatches of a batch on each replica")
    add("--optim", choices=OPTIMIZERS, default="adamw", help="the optimizer")
    add("--dtype", choices=DTYPES, help="dtype of weights, gradients and optimizer; none: float32")
    add("--bf16", action="store_true", help="weights and gradients in bfloat16, FP32 masters and optimizer")
    add("--fp16", action="store_true", help="the same in float16, with a loss scale (flush, gpipe, 2bw)")


def _add_training(group) -> None:
    add = both_spellings(group)
    add("--do_train", action="store_true", help="train; without --do_train and --do_eval: both, as files are given")
    add("--do_eval", action="store_true", help="evaluate at the end, and as --eval_strategy says")
    add_microbatch(group)
    add("--per_device_eval_batch_size", type=count, help="must equal that of training: stages have one shape")
    add("--learning_rate", type=real, default=5e-5, help="peak of the learning rate")
    add("--weight_decay", type=real, default=0.0, help="decay of all weights except biases and norms")
    add("--adam_beta1", type=decay, default=0.9, help="decay of the first moment")
    add("--adam_beta2", type=decay, default=0.999, help="decay of the second moment")
    add("--adam_epsilon", type=real, default=1e-8, help="added to the root of the second moment")
    add("--momentum", type=real, default=0.9, help="momentum of sgd")
    add("--max_grad_norm", type=real, help="gradients are clipped to this norm, 0: never; default 1, asynchronous 0")
    add("--num_train_epochs", type=real, default=3.0, help="passes over the data")
    add("--max_steps", type=int, default=-1, help="batches, in place of epochs, if above 0")
    add("--lr_scheduler_type", choices=SCHEDULERS, default="linear", help="schedule of transformers")
    add("--warmup_steps", type=count_from_0, default=0, help="batches in which the learning rate rises")
    add("--warmup_ratio", type=part, default=0.0, help="the same as a fraction of all batches")
    add("--dataloader_drop_last", action="store_true", help="leave out an epoch's short last batch")
    add("--initial_loss_scale", type=scale, help="loss scale of the first batch (--fp16); 65536")
    add("--loss_scale_window", type=count, help="batches without an overflow after which it grows; 2000")
    add("--loss_scale_growth", type=within(1), help="factor by which it grows; 2")
    add("--loss_scale_backoff", type=part, help="factor by which an overflow lowers it; 0.5")
    add("--min_loss_scale", type=scale, help="an overflow at this scale ends the run; 1")
    add("--seed", type=count_from_0, default=42, help="seed of dropout, the order of samples and new parameters")


def _add_pipeline(group) -> None:
    add = both_spellings(group)
    add("--pipeline_schedule", choices=SCHEDULES, default="ftpipe",
        help="ftpipe does not wait; flush is exact; l2l has weights on the host")  # fmt: skip
    add("--partition", metavar="FILE", help="file of tools/partition.py; none: the model is profiled and cut here")
    add("--max_stages_per_device", type=count, default=2, help="limit if the model is cut here")
    add("--memory", default="16GiB", help="memory of a device, if the model is cut here")
    add("--bandwidth", type=real, default=10.0, metavar="GB/S", help="between devices, if the model is cut here")
    add("--weight_prediction", action="store_true", help="forwards use the weights that their backwards will (4.2)")
    add("--gap_aware", action="store_true", help="gradients are divided by how far the weights have moved since")
    add("--provisional_steps", action="store_true", help="forwards use a step with the gradients so far")
    add("--data_parallel_size", type=count, default=1, help="replicas of the pipeline, which share each batch")
    add("--go_on_without_lost_ranks", action="store_true",
        help="replicas go on when a rank is lost, and take in a new process (flush, gpipe, 2bw)")  # fmt: skip
    add("--failure_timeout", type=within(1), help="seconds of silence after which a rank counts as lost; 10")
    add("--minimum_speed", type=part, help="end the run if less than this share of the speed would be left; 0")
    add("--no_recompute", action="store_true", help="keep activations instead (not ftpipe and l2l)")
    add_relay(add)
    freezing_arguments.add_freezing(add)
    add(
        "--gradient_checkpointing",
        action="store_true",
        default=None,
        help="recompute, the default; false: as --no_recompute, without effect under ftpipe and l2l",
    )
    add("--dry_run", action="store_true", help="memory and time of the job, without weights")
    add("--devices", type=count, help="number of devices for --dry_run; a run has one for each process")
    add("--distributed_backend", choices=("gloo", "nccl"), help="none: nccl on GPUs")
    add("--distributed_timeout_minutes", type=count, default=10, help="limit of a transfer's duration")


def _add_output(group) -> None:
    add = both_spellings(group)
    add("--output_dir", metavar="FOLDER", help="the model at the end, and checkpoints")
    add("--overwrite_output_dir", action="store_true",
        help="begin again, and remove the checkpoints of another run in --output_dir")  # fmt: skip
    add("--save_strategy", choices=(*STRATEGIES, "best"),
        help="when checkpoints are written, and at the end; none: steps with --save_steps, or no")  # fmt: skip
    add("--save_steps", type=steps, help="batches between checkpoints, or below 1 a fraction of all; 500")
    add_merge(add)
    add("--save_total_limit", type=count, help="largest number of checkpoints to keep")
    add("--resume_from_checkpoint", "--resume", dest="resume_from_checkpoint", nargs="?", const="last",
        metavar="FOLDER", help="go on from there, or the last one; auto: the last one if there is one")  # fmt: skip
    add("--load_best_model_at_end", action="store_true", help="the model at the end is that of the best checkpoint")
    add("--metric_for_best_model", metavar="NAME", help="metric of the evaluations that is compared; loss")
    add("--greater_is_better", action="store_true", default=None, help="none: unless the name ends with loss")
    add("--early_stopping_patience", type=count, help="evaluations without an improvement that end the run")
    add("--early_stopping_threshold", type=real, help="what an improvement has to exceed; 0")
    add("--eval_strategy", "--evaluation_strategy", dest="eval_strategy", choices=STRATEGIES,
        help="when the run evaluates before its end; none: steps with --eval_steps, or no")  # fmt: skip
    add("--eval_steps", type=steps,
        help="batches between evaluations, or below 1 a fraction of all; as --logging_steps")  # fmt: skip
    add("--eval_each_epoch", action="store_true", help="the same as --eval_strategy epoch")
    add("--logging_steps", type=count, default=10, help="batches of a log line")
    add("--report_to", nargs="+", choices=("tensorboard", "wandb", "none"),
        help="where values are shown; none given: tensorboard, if --logging_dir is given")  # fmt: skip
    add("--logging_dir", metavar="FOLDER", help="for TensorBoard; OUTPUT_DIR/runs")
    add("--run_name", help="name of the run at Weights & Biases")
    add("--metrics_file", metavar="FILE", help="each batch and evaluation as a JSON line")
    add("--pipeline_timeline", metavar="FOLDER", help="draw the last batches, planned above measured")
    add("--pipeline_timeline_iterations", type=count, default=6, help="number of batches in the picture")
    add("--logging_level", type=int, help="level of Python's logging")
