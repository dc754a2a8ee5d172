"""Rules about training that freezes layers (`--freeze-training`) or changes the pipeline (`--elastic-pipeline`)."""

import math
from collections.abc import Iterator
from contextlib import suppress

from megatron.documents import counted
from megatron.elastic.freezing import RULES as FREEZE_RULES
from megatron.elastic.freezing import FreezeRule, FreezeSettings
from megatron.elastic.stages import StageLayers, cut_at_frozen
from megatron.trainer.arguments.flags.config import choice_of
from megatron.trainer.arguments.flags.model import CLASSIFIERS
from megatron.trainer.arguments.flags.specification import Arguments, name_of
from megatron.trainer.arguments.flags.training import FREEZING
from megatron.trainer.arguments.rules.schedule import behind_frozen

_OF_BOTH = ("freeze_interval", "freeze_start", "freeze_training", "elastic_pipeline")


def flags(args: Arguments) -> None:
    """Check that the flags of freezing fit together.

    Sets `changes`: whether the pipeline may change during training; `arrangement` and `frozen_stages`: those of a
    changed pipeline, None until then; `elastic_schedule` and `elastic_micro_batch_size`: tuples of numbers.
    """
    args.frozen_stages = args.arrangement = None
    args.changes = args.freeze_training or args.elastic_pipeline
    for each in FREEZING.flags:
        needs = "--elastic-pipeline" if each.dest.startswith("elastic") else "--freeze-training"
        serves = args.changes if each.dest in _OF_BOTH else getattr(args, needs[2:].replace("-", "_"))
        if each.dest in args.given and not serves:
            raise ValueError(f"{each.name} needs {needs}; add it, or leave this out")
    if not args.changes:
        return
    asked = "--freeze-training" if args.freeze_training else "--elastic-pipeline"
    if args.freeze_interval is None:
        raise ValueError(f"{asked} needs --freeze-interval, the iterations between two decisions")
    if args.elastic_schedule is not None:
        args.elastic_schedule = _sizes(args)
    if args.elastic_micro_batch_size is not None:
        args.elastic_micro_batch_size = _micro_batch_sizes(args)
    if args.elastic_batch == "grow":
        _grows(args)
    if args.freeze_schedule is not None and "freeze_rule" not in args.given:
        args.freeze_rule = "schedule"
    _without_effect(args)
    if args.freeze_training:
        make_rule(args)
    if args.freeze_watch_validation is not None and args.eval_iters == 0:  # before a classifier's default is filled in
        raise ValueError(
            f"--freeze-watch-validation {args.freeze_watch_validation:g} looks at evaluations, and with --eval-iters 0 "
            "there are none; raise the latter, or leave the former out"
        )
    if args.activation_cache is not None:
        _cache(args)
    _embeddings_and_weights(args, asked)


def _without_effect(args: Arguments) -> None:
    """Raise ValueError for a flag that no code would read."""
    if args.freeze_schedule is not None and args.freeze_rule == "gradients":
        raise ValueError(
            f"--freeze-schedule {args.freeze_schedule} has no effect with --freeze-rule gradients; leave out one"
        )
    if args.freeze_schedule is not None and "freeze_alpha" in args.given:
        raise ValueError("--freeze-alpha has no effect with --freeze-schedule; leave one of them out")
    for name in ("activation_cache_gib", "activation_cache_use"):
        if name in args.given and args.activation_cache is None:
            raise ValueError(
                f"{name_of(name)} {getattr(args, name)} is about an activation cache, and there is none; add "
                "--activation-cache with its folder, or leave this out"
            )


def _cache(args: Arguments) -> None:
    """Refuse an activation cache for samples that do not repeat."""
    if args.architecture not in CLASSIFIERS:
        raise ValueError(
            f"--activation-cache {args.activation_cache}: the samples of this program do not come again (an index of "
            "pretraining data makes others in each epoch, and random masks differ); leave it out, or use "
            "pretrain_vision_classify.py or finetune_bert.py"
        )
    if args.activation_cache == "":
        raise ValueError("--activation-cache is empty; name a folder or leave the flag out")


def _sizes(args: Arguments) -> tuple[int, ...]:
    """Parse --elastic-schedule: the number of ranks of the pipeline after each interval."""
    text, most = args.elastic_schedule, args.pipeline_model_parallel_size
    num_ranks = most * args.data_parallel_size
    sizes = _numbers("--elastic-schedule", text, "ranks; give such as 4,2,1")
    for each in sizes:
        if not 1 <= each <= most or num_ranks % each:
            raise ValueError(
                f"--elastic-schedule {text}: a pipeline of {counted(each, 'rank')} does not fit {num_ranks} ranks that "
                f"begin with {most} in each; give divisors of {num_ranks} up to {most}"
            )
    return sizes


def _micro_batch_sizes(args: Arguments) -> tuple[int, ...]:
    """Parse --elastic-micro-batch-size: the samples of a microbatch after each interval."""
    return _numbers("--elastic-micro-batch-size", args.elastic_micro_batch_size, "samples; give such as 2,4,8", least=1)


def _numbers(flag: str, text: str, what: str, *, least: float = -math.inf) -> tuple[int, ...]:
    """The whole numbers of at least `least` that a flag lists. Raises ValueError whose text ends in `what`."""
    with suppress(ValueError):
        found = tuple(map(int, text.split(",")))
        if min(found) >= least:
            return found
    raise ValueError(f"{flag} {text} is no list of numbers of {what}")


def _grows(args: Arguments) -> None:
    """Check the requirements of a batch that grows with the number of replicas."""
    if args.train_samples is None:
        raise ValueError(
            "--elastic-batch grow changes how many iterations a run has; say its end with --train-samples, not "
            "--train-iters or --epochs"
        )
    if args.rampup_batch_size is not None or args.step_batch_size_schedule is not None:
        raise ValueError(
            "--elastic-batch grow cannot be combined with --rampup-batch-size or --step-batch-size-schedule, which say "
            "the batch themselves; leave one of them out"
        )


def _embeddings_and_weights(args: Arguments, asked: str) -> None:
    """Refuse flags that freezing excludes."""
    preset = choice_of(args)
    name = preset.flag
    v = args.virtual_pipeline_model_parallel_size
    if not args.untie_embeddings_and_output_weights:
        raise ValueError(
            f"{asked} would freeze the head with the embedding that it is tied to, or separate the two; add "
            "--untie-embeddings-and-output-weights"
        )
    for is_asked, what, why in (
        (preset.residency is not None, name, "brings the weights of stages that are trained to the device and back"),
        (v is not None or preset.interleaves, name if v is None else "a rank with several stages",
         "has no room for a frozen stage beside a trained one"),
        (preset.policy.updates_alone, name, "keeps versions for stages of which each steps by itself"),
        (args.pipeline_2bw_provisional != "off", f"--2bw-provisional {args.pipeline_2bw_provisional}",
         "predicts all weights of a rank together"),
    ):  # fmt: skip
        if is_asked:
            raise ValueError(f"{asked}: {what} {why}; use flush, gpipe, bpipe or 2bw without it")


def make_rule(args: Arguments) -> FreezeRule:
    """Make the freezing rule of `args`. Raises ValueError for settings that the rule cannot use."""
    text = args.freeze_schedule
    counts = () if text is None else _numbers("--freeze-schedule", text, "layers; give such as 0,4,6")
    try:
        return FREEZE_RULES[args.freeze_rule](FreezeSettings(args.num_layers, args.freeze_alpha, counts))
    except ValueError as error:
        flag = f"--freeze-rule {args.freeze_rule}" if text is None else f"--freeze-schedule {text}"
        raise ValueError(f"{flag}: {error}") from error


def schedules(args: Arguments) -> None:
    """Check that the schedule accepts every batch size of the run, wherever the frozen layers end.

    The listed numbers of ranks and microbatch sizes must divide each batch, too.
    """
    if args.elastic_pipeline and args.decrease_batch_size_if_needed:
        raise ValueError(
            "--elastic-pipeline: --decrease-batch-size-if-needed would let the batch shrink with the pipeline; leave "
            "it out, and give a batch that microbatches and replicas divide"
        )
    _lists_by_hand(args)
    if not args.freeze_training:
        return
    try:
        for stages in _all_borders(args.pipeline_model_parallel_size):
            schedule = behind_frozen(args, stages)
            for num_microbatches in set(args.batch_sizes.all_num_microbatches()):
                schedule.validate(num_microbatches)
    except ValueError as error:
        raise ValueError(f"--freeze-training: {error}") from error


def intervals(args: Arguments) -> list[str]:
    """Check --freeze-interval: return a note if training ends before the first decision."""
    if not args.changes or args.skip_train:
        return []
    first = args.freeze_start + args.freeze_interval
    if first < args.train_iters:
        return []
    begins = f"--freeze-start {args.freeze_start} and " if args.freeze_start else ""
    return [
        f"nothing ever changes: with {begins}--freeze-interval {args.freeze_interval} the first decision comes at "
        f"iteration {first}, and training ends at iteration {args.train_iters}"
    ]


def of_interval(numbers: tuple[int, ...], interval: int) -> int:
    """The number that a list gives for interval 1, 2, ...; the last number holds from its interval on."""
    return numbers[min(interval, len(numbers)) - 1]


def _lists_by_hand(args: Arguments) -> None:
    """Check the lists of --elastic-schedule and --elastic-micro-batch-size."""
    pipelines, microbatches = args.elastic_schedule, args.elastic_micro_batch_size
    num_ranks = args.pipeline_model_parallel_size * args.data_parallel_size
    for interval in range(1, max(len(pipelines or ()), len(microbatches or ())) + 1):
        size = args.pipeline_model_parallel_size if pipelines is None else of_interval(pipelines, interval)
        samples = args.micro_batch_size if microbatches is None else of_interval(microbatches, interval)
        for batch in args.batch_sizes.all_sizes():
            if batch % (samples * num_ranks // size):
                raise ValueError(
                    f"after interval {interval} --elastic-schedule and --elastic-micro-batch-size ask for "
                    f"{num_ranks // size} replicas that take {samples} samples at a time, which do not divide a batch "
                    f"of {batch}; give others, or batches of a multiple of {samples * num_ranks // size}"
                )


def _all_borders(num_ranks: int) -> Iterator[StageLayers]:
    """The stages of a pipeline for every possible number of frozen layers, if each rank has two layers."""
    for num_frozen in range(1, 2 * num_ranks):
        yield cut_at_frozen((2,) * num_ranks, num_frozen)
