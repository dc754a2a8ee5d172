"""Rules about the split of the layers into stages: the number of stages of a rank, and the layers of each stage."""

from collections import Counter

from megatron.documents import counted
from megatron.planner.job.configuration import even_layers, layout_text
from megatron.trainer.arguments.flags.config import choice_of, flag_of_program
from megatron.trainer.arguments.flags.specification import Arguments, name_of

_WAYS = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
)


def layer_list(args: Arguments) -> None:
    """Convert --num-layer-list to a layout."""
    text = args.num_layer_list
    if text is None:
        return
    if args.pipeline_model_parallel_layout is not None:
        raise ValueError("--num-layer-list and --pipeline-model-parallel-layout exclude each other; keep one")
    if not all(each.strip().isdecimal() for each in text.split(",")):
        raise ValueError(f"--num-layer-list {text} must be whole numbers divided by commas, such as 17,20,22,21")
    args.pipeline_model_parallel_layout = layout_text([int(each) for each in text.split(",")])


def virtual_stages(args: Arguments) -> None:
    """Set `virtual_pipeline_model_parallel_size`: the stages of each rank, None for one, as in Megatron-LM.

    With weights on the host, a stage has one layer unless the flags say otherwise. A schedule that supports a single
    number of stages sets this number.
    """
    given = [name for name in _WAYS if getattr(args, name) is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(map(name_of, given))} exclude each other; keep one")
    on_host = choice_of(args).residency is not None
    if args.program is not None:
        _stages_of_program(args)
        return
    of_schedule = choice_of(args).virtual_stages
    num_stages = args.num_virtual_stages_per_pipeline_rank or (of_schedule if not given else None) or 1
    if on_host and not given:
        num_stages = max(1, _counted_layers(args) // args.pipeline_model_parallel_size)
    if args.pipeline_model_parallel_layout is not None:
        num_stages = _stages_in_layout(args)
    elif args.num_layers_per_virtual_pipeline_stage is not None:
        num_stages = _stages_of_equal_layers(args)
    if num_stages > 1 and args.pipeline_model_parallel_size == 1 and not on_host:
        asks = f"{name_of(given[0])} {getattr(args, given[0])}" if given else choice_of(args).flag
        raise ValueError(
            f"{asks} gives a rank {num_stages} stages, which buys nothing "
            "with --pipeline-model-parallel-size 1; raise the latter or leave the former out"
        )
    args.virtual_pipeline_model_parallel_size = num_stages if num_stages > 1 else None


def _stages_of_program(args: Arguments) -> None:
    """Set the number of stages from the program; if ranks have different numbers, to the largest."""
    schedule = args.program
    if args.pipeline_model_parallel_layout is not None:
        in_layout = _stages_in_layout(args) * args.pipeline_model_parallel_size
        if in_layout != schedule.num_stages:
            raise ValueError(
                f"--pipeline-model-parallel-layout {args.pipeline_model_parallel_layout} has {in_layout} stages, and "
                f"{flag_of_program(args)} has {schedule.num_stages}; write as many, or leave the "
                "layout out"
            )
    most = schedule.num_virtual_stages
    args.virtual_pipeline_model_parallel_size = most if most > 1 else None


def _stages_of_equal_layers(args: Arguments) -> int:
    size = args.num_layers_per_virtual_pipeline_stage
    if args.decoder_first_pipeline_num_layers is not None or args.decoder_last_pipeline_num_layers is not None:
        raise ValueError(
            f"--num-layers-per-virtual-pipeline-stage {size} cannot hold for every stage where the first or the last "
            "rank has layers of its own number; use --num-virtual-stages-per-pipeline-rank"
        )
    per_rank, rest = divmod(_counted_layers(args), args.pipeline_model_parallel_size)
    if rest:
        raise ValueError(
            f"{_said(args)} is not divisible by --pipeline-model-parallel-size {args.pipeline_model_parallel_size}, so "
            f"stages have no --num-layers-per-virtual-pipeline-stage {size}; use --num-virtual-stages-per-pipeline-rank"
        )
    if per_rank % size:
        raise ValueError(
            f"the {per_rank} layers of a rank cannot be cut into stages of --num-layers-per-virtual-pipeline-stage "
            f"{size}; choose a divisor of {per_rank}"
        )
    return per_rank // size


def _layout(args: Arguments):
    """Parse --pipeline-model-parallel-layout into megatron.core's layout."""
    from megatron import backend  # imports torch, which the other rules do not need

    backend.install()
    from megatron.trainer.arguments.flags.values import parse_layout

    return parse_layout(
        args.pipeline_model_parallel_layout,
        num_ranks=args.pipeline_model_parallel_size,
        num_layers=args.num_layers,
        placement=choice_of(args).placement,
        num_further=args.mtp_num_layers,
    )


def stage_of_further_layers(args: Arguments) -> int | None:
    """The stage with the multi-token prediction layers, counted from the end; None if there are no such layers.

    It is -1, or -2 if the layout puts the loss on another stage.
    """
    if args.mtp_num_layers is None:
        return None
    if args.pipeline_model_parallel_layout is None:
        return -1
    layout = _layout(args).layout
    in_order = [held for chunk in zip(*layout, strict=True) for held in chunk]
    return next(stage for stage, held in enumerate(in_order) if any(each.name == "mtp" for each in held)) - len(
        in_order
    )


def tied_stage(args: Arguments) -> int | None:
    """The stage that shares the first stage's embedding, if it is not the last stage; otherwise None."""
    stage = stage_of_further_layers(args)
    return None if stage in (None, -1) else num_stages(args) + stage


def further_layers(args: Arguments) -> None:
    """Check that the multi-token prediction layers are on a stage from which the stage with the loss can take them."""
    stage, program = stage_of_further_layers(args), args.program
    if program is not None and program.tied_embeddings:
        _, of_program = program.program.tied_stages
        copy = num_stages(args) + (-1 if stage is None else stage)
        if of_program != copy:
            raise ValueError(
                f"{flag_of_program(args)} adds up the gradients of the embedding of the first stage "
                f"and {'the last' if of_program == num_stages(args) - 1 else of_program}, and "
                f"{'the output layer is' if stage is None else 'layers of multi-token prediction are'} on stage "
                f"{copy}; write # tied_stage: {copy} into it"
            )
    if stage is None or stage == -1:
        return
    layout = f"--pipeline-model-parallel-layout {args.pipeline_model_parallel_layout}"
    if stage < -2:
        raise ValueError(f"{layout} has stages between m and L, which hold nothing; write m|L, or mL")
    if not args.untie_embeddings_and_output_weights:
        raise ValueError(
            f"{layout} leaves m and L to two stages, so that three stages would share the embedding; write mL, or add "
            "--untie-embeddings-and-output-weights"
        )


def _stages_in_layout(args: Arguments) -> int:
    return _layout(args).virtual_pipeline_model_parallel_size


def layer_split(args: Arguments) -> tuple[int, int | None]:
    """The (ranks, stages on each rank or None for one) over which megatron.core splits the layers.

    If stages are assigned round-robin, they are the pipeline's, as in Megatron-LM. Under another placement there is one
    rank per stage, since the layers of a stage do not depend on its rank. The same holds for weights on the host, since
    megatron.core supports several stages on a rank only with several ranks.
    """
    p, v = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    choice = choice_of(args)
    is_megatrons = choice.deals_out and choice.residency is None
    return (p, v) if is_megatrons else (num_stages(args), None)


def num_stages(args: Arguments) -> int:
    """The number of stages in the whole pipeline."""
    if args.program is not None:
        return args.program.num_stages
    return args.pipeline_model_parallel_size * (args.virtual_pipeline_model_parallel_size or 1)


def layout_of(args: Arguments) -> str | None:
    """The layout of the layers: the given one, or one with stages as equal as possible.

    None if all stages are equal, or if megatron.core derives the split from other flags.
    """
    if args.pipeline_model_parallel_layout is not None:
        return args.pipeline_model_parallel_layout
    ends = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if ends != (None, None) or _counted_layers(args) % num_stages(args) == 0:
        return None
    return layout_text(_as_equal_as_can_be(args), args.mtp_num_layers or 0)


def _as_equal_as_can_be(args: Arguments) -> list[int]:
    """The number of layers of each stage, in stage order, if flags give neither a layout nor the end stages."""
    counts = [*even_layers(_counted_layers(args), num_stages(args))]
    counts[0] -= args.account_for_embedding_in_pipeline_split
    counts[-1] -= args.account_for_loss_in_pipeline_split
    return counts


def layers(args: Arguments) -> list[str]:
    """Check that every stage has layers, and that the layers between given end stages divide evenly.

    Returns a note if stages have different numbers of layers.
    """
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    sets_ends = first is not None or last is not None
    accounts = args.account_for_embedding_in_pipeline_split or args.account_for_loss_in_pipeline_split
    if args.pipeline_model_parallel_layout is not None:
        if sets_ends or accounts:
            raise ValueError(
                "--pipeline-model-parallel-layout says what every stage holds, so "
                "--decoder-first/last-pipeline-num-layers and --account-for-... have nothing to add; leave them out"
            )
    elif sets_ends and accounts:
        raise ValueError("--account-for-... and --decoder-first/last-pipeline-num-layers exclude each other")
    elif sets_ends:
        _ends_of_their_own(args, first, last)
    else:
        return _equal_stages(args)
    return []


def _ends_of_their_own(args: Arguments, first: int | None, last: int | None) -> None:
    (p, _), num_layers = layer_split(args), args.num_layers
    if p == 1:
        raise ValueError(
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers need "
            "--pipeline-model-parallel-size greater than 1"
        )
    middle = p - (first is not None) - (last is not None)
    rest = num_layers - (first or 0) - (last or 0)
    if (middle == 0 and rest != 0) or (middle > 0 and (rest < middle or rest % middle)):
        raise ValueError(
            f"{_said(args)} leaves {rest} layers for the other {middle} stages, which "
            f"does not come out even; change the first or last stage's number of layers"
        )
    counts = {"first": first, "last": last, "other": rest // middle if middle else None}
    for which, count in counts.items():
        _check_virtual(args, count, f"the {which} rank{'s' * (which == 'other')}")


def _equal_stages(args: Arguments) -> list[str]:
    stages = num_stages(args)
    if _counted_layers(args) < stages:
        raise ValueError(
            f"{_said(args)} is less than the {stages} stages of the pipeline; take fewer stages, or say with "
            "--pipeline-model-parallel-layout which have no layer"
        )
    layout = layout_of(args)
    if layout is None:
        return []
    numbers = Counter(_as_equal_as_can_be(args))
    most, *others = sorted(numbers, reverse=True)
    parts = [f"{counted(numbers[most], 'stage')} of {most}", *(f"{numbers[count]} of {count}" for count in others)]
    return [f"{_said(args)} on {stages} stages: {', '.join(parts)}, --pipeline-model-parallel-layout {layout}"]


def _said(args: Arguments) -> str:
    """The number of layers as the user gave it."""
    if args.architecture == "t5":
        return (
            f"the sum of --encoder-num-layers {args.encoder_num_layers} and --decoder-num-layers "
            f"{args.decoder_num_layers}"
        )
    return f"--num-layers {args.num_layers}"


def _counted_layers(args: Arguments) -> int:
    """The number of layers, plus one each for the embedding and the loss if they count as layers."""
    return args.num_layers + args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split


def _check_virtual(args: Arguments, count: int | None, where: str) -> None:
    _, v = layer_split(args)
    if count is not None and v is not None and count % v:
        raise ValueError(
            f"the {count} layers of {where} cannot be dealt out to {v} stages alike; change "
            "--num-virtual-stages-per-pipeline-rank or the number of layers, or give --pipeline-model-parallel-layout"
        )


def recomputed_chunks(args: Arguments) -> None:
    """Check that the recomputed chunks of --recompute-method uniform divide each stage.

    megatron.core takes all chunks to be equally long, and would look for layers that a shorter last chunk lacks.
    """
    if args.recompute_method != "uniform" or args.recompute_num_layers == 1:
        return
    size = args.recompute_num_layers
    if args.freeze_training or args.elastic_pipeline:
        raise ValueError(
            f"--recompute-num-layers {size} with --recompute-method uniform needs stages of a multiple of {size} "
            "layers, and where layers freeze or the pipeline changes stages have any number; give 1, or use block"
        )
    for count in sorted(_layers_of_stages(args)):
        if count % size:
            raise ValueError(
                f"--recompute-num-layers {size} does not divide the {count} layers of a stage into chunks of "
                f"--recompute-method uniform; give a divisor of {count}, or use block"
            )


def _layers_of_stages(args: Arguments) -> set[int]:
    """The numbers of layers that stages have."""
    if args.pipeline_model_parallel_layout is not None:
        layout = _layout(args)
        return {sum(each.name == "decoder" for each in stage) for rank in layout.layout for stage in rank}
    p, v = layer_split(args)
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if first is None and last is None:
        return {*_as_equal_as_can_be(args)}
    middle = p - (first is not None) - (last is not None)
    rest = (args.num_layers - (first or 0) - (last or 0)) // max(middle, 1)
    return {count // (v or 1) for count in (first, last, rest if middle else None) if count is not None}


RULES = (layer_list, virtual_stages, layers, further_layers, recomputed_chunks)
