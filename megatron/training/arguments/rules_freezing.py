"""Rules about training that freezes layers: `--freeze-training`."""

import argparse
from collections.abc import Iterator

from megatron.elastic.freeze_rule import RULES as FREEZE_RULES
from megatron.elastic.freeze_rule import FreezeRule, Settings
from megatron.elastic.stages import Stages, stages_of
from megatron.pipeline.schedules import PRESETS
from megatron.training.arguments.freezing import GROUP
from megatron.training.arguments.rules_run import pipeline_schedule


def flags(args: argparse.Namespace) -> None:
    """The flags fit together. Fills `frozen_stages`: the pipeline's, once some are frozen; None until then."""
    args.frozen_stages = None
    if not args.freeze_training:
        for each in GROUP.flags:
            if each.dest in args.given:
                raise ValueError(f"{each.name} needs --freeze-training; add it, or leave this out")
        return
    if args.freeze_interval is None:
        raise ValueError("--freeze-training needs --freeze-interval, the iterations between two decisions")
    if args.freeze_schedule is not None and "freeze_rule" not in args.given:
        args.freeze_rule = "schedule"
    if args.freeze_schedule is not None and "freeze_alpha" in args.given:
        raise ValueError("--freeze-alpha has no say where --freeze-schedule is given; leave one of them out")
    make_rule(args)
    _embeddings_and_weights(args)


def _embeddings_and_weights(args: argparse.Namespace) -> None:
    """What cannot be combined, in the words of its flags."""
    preset, name = PRESETS[args.pipeline_schedule], f"--pipeline-schedule {args.pipeline_schedule}"
    v = args.virtual_pipeline_model_parallel_size
    if not args.untie_embeddings_and_output_weights:
        raise ValueError(
            "--freeze-training would freeze the head with the embedding that it is tied to; add "
            "--untie-embeddings-and-output-weights"
        )
    for is_asked, what, why in (
        (preset.residency is not None, name, "brings the weights of stages that are trained to the device and back"),
        (v is not None or preset.interleaves, name if v is None else "a rank with several stages",
         "has no room for a frozen stage beside a trained one"),
        (preset.policy.updates_alone, name, "keeps versions for stages of which each steps by itself"),
        (args.pipeline_2bw_provisional != "off", f"--2bw-provisional {args.pipeline_2bw_provisional}",
         "predicts all weights of a rank together"),
        (args.pipeline_extra_warmup, "--pipeline-extra-warmup", "counts how far ahead a stage is by all stages"),
    ):  # fmt: skip
        if is_asked:
            raise ValueError(f"--freeze-training: {what} {why}; use flush, gpipe, bpipe or 2bw without it")


def make_rule(args: argparse.Namespace) -> FreezeRule:
    """The rule that `args` ask for. Raises ValueError for settings that it cannot use."""
    text = args.freeze_schedule
    try:
        counts = tuple(map(int, text.split(","))) if text is not None else ()
    except ValueError:
        raise ValueError(f"--freeze-schedule {text} is no list of numbers of layers; give such as 0,4,6") from None
    try:
        return FREEZE_RULES[args.freeze_rule](Settings(args.num_layers, args.freeze_alpha, counts))
    except ValueError as error:
        flag = f"--freeze-rule {args.freeze_rule}" if text is None else f"--freeze-schedule {text}"
        raise ValueError(f"{flag}: {error}") from error


def schedules(args: argparse.Namespace) -> None:
    """Wherever the frozen prefix ends, the schedule accepts every batch size of the run."""
    if not args.freeze_training:
        return
    try:
        for stages in _all_borders(args.pipeline_model_parallel_size):
            args.frozen_stages = stages
            program = pipeline_schedule(args)
            for num_microbatches in set(args.batch_sizes.all_num_microbatches()):
                program.validate(num_microbatches)
    except ValueError as error:
        raise ValueError(f"--freeze-training: {error}") from error
    finally:
        args.frozen_stages = None


def _all_borders(num_ranks: int) -> Iterator[Stages]:
    """The stages of a pipeline with any border, as if each rank had two layers."""
    for num_frozen in range(1, 2 * num_ranks):
        yield stages_of((2,) * num_ranks, num_frozen)
