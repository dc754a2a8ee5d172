"""The command line of stages: how layers are dealt out, which schedules and batches go with them, what is refused."""

import pytest

from megatron import backend

backend.install()

from megatron.pipeline.schedules import Schedule
from megatron.trainer.arguments import parse_args, validate_args
from megatron.trainer.models.core_config import transformer_config
from megatron.trainer.plan import from_flags
from tests.trainer.arguments.command_line import arguments, argv


def test_stages_and_layers():
    """Layers are split as megatron.core does; where an end has its own number, the rest has to come out even."""
    args = arguments("--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 2", world_size=3)
    assert args.data_parallel_size == 1
    with pytest.raises(ValueError, match="does not come out even"):
        arguments("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2", world_size=4)


@pytest.mark.parametrize("flags", ["--pipeline-schedule bpipe", "--balance-activations"])
def test_balancing_with_and_without_something_to_move(flags):
    """The preset and the flag are one schedule. Where no stage is over its bound, a note says so and nothing moves."""
    moving = arguments(f"{flags} --pipeline-model-parallel-size 4", world_size=4)
    assert moving.moves_activations
    assert moving.schedule == Schedule.preset("flush", num_stages=4, balance=True, tied_embeddings=True)
    for stages, batch in ((2, 8), (4, 3)):
        args = parse_args(argv(f"{flags} --pipeline-model-parallel-size {stages} --global-batch-size {batch}"))
        notes = validate_args(args, world_size=stages)
        assert not args.moves_activations
        text = "has nothing to move with these stages and batches: saved activations stay where they are"
        assert f"{flags} {text}" in notes
    grows = "--global-batch-size 8 --rampup-batch-size 2 2 100"
    assert arguments(f"{flags} --pipeline-model-parallel-size 4 {grows}", world_size=4).moves_activations


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--pipeline-schedule gpipe", "gpipe saves a whole batch at every stage, so there is nothing to balance"),
        (
            "--pipeline-schedule pipedream --clip-grad 0 --untie-embeddings-and-output-weights --global-batch-size 1",
            "may drain after every microbatch, so no eviction can be planned ahead",
        ),
    ],
    ids=["gpipe", "pipedream"],
)
def test_schedules_that_cannot_balance_refuse_it(flags, reason):
    """In one sentence, before anything starts."""
    flags += " --pipeline-model-parallel-size 4"
    assert not arguments(flags, world_size=4).moves_activations
    with pytest.raises(ValueError, match=reason):
        arguments(f"{flags} --balance-activations", world_size=4)


HOST = "--pipeline-offload-activations"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
LATENTS = "--multi-latent-attention --position-embedding-type rope"


@pytest.mark.parametrize("modules", [f"{SELECTIVE} layernorm", f"{LATENTS} {SELECTIVE} mla_up_proj"])
@pytest.mark.parametrize(
    "flags", ["--pipeline-schedule bpipe", "--balance-activations", f"{HOST} 3", "--log-saved-activations"]
)
def test_activations_that_autograd_holds_are_neither_moved_nor_counted(flags, modules):
    """In one sentence, before anything is built, also in a dry run. Where they stay and nobody counts, all is well."""
    p4 = "--pipeline-model-parallel-size 4"
    assert not arguments(f"{modules} {p4}", world_size=4).moves_activations
    with pytest.raises(ValueError, match="activations that cannot be freed can be neither moved nor counted"):
        arguments(f"{modules} {p4} {flags}", world_size=4)


def test_a_bound_on_the_device():
    """The flag is the schedule's bound; where no rank has more, a note says so."""
    args = arguments(f"{HOST} 3 --pipeline-model-parallel-size 4", world_size=4)
    assert args.moves_activations
    assert args.schedule == Schedule.preset("flush", num_stages=4, most_on_device=3, tied_embeddings=True)
    notes = validate_args(parse_args(argv(f"{HOST} 4 --pipeline-model-parallel-size 4")), world_size=4)
    assert any(each.startswith(f"{HOST} 4 has nothing to move with these stages and batches") for each in notes)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (f"{HOST} 2", f"{HOST} 2 must be at least 3"),
        (f"{HOST} 3 --pipeline-schedule zb-h1", "zb-h1 computes backwards in halves"),
        (f"{HOST} 3 --pipeline-schedule bpipe", "not both"),
        (f"{HOST} 3 --pipeline-schedule l2l", "set the stash of the residency instead"),
        (
            f"{HOST} 3 --untie-embeddings-and-output-weights --freeze-training --freeze-interval 2",
            "is for stages that are trained to the end",
        ),
    ],
    ids=["two", "halves", "bpipe", "l2l", "freezing"],
)
def test_what_does_not_go_with_a_bound_on_the_device(flags, reason):
    with pytest.raises(ValueError, match=reason):
        arguments(f"{flags} --pipeline-model-parallel-size 4", world_size=4)


V = "--num-virtual-stages-per-pipeline-rank"
LAYOUT = "--pipeline-model-parallel-layout"
FURTHER = "--mtp-num-layers 1 --position-embedding-type none"


@pytest.mark.parametrize(
    "flags, v",
    [
        ("", None),
        (f"{V} 1", None),
        (f"{V} 2", 2),
        ("--num-layers-per-virtual-pipeline-stage 1", 2),
        ("--num-layers-per-virtual-pipeline-stage 2", None),
        ("--num-layers 7 --account-for-embedding-in-pipeline-split --num-layers-per-virtual-pipeline-stage 2", 2),
        (f"--num-layers 8 --decoder-first-pipeline-num-layers 2 {V} 2", 2),
        (f"{LAYOUT} Et|ttt,L", None),
        (f"{LAYOUT} Et|(t|)*2tL", 2),
        (f"{LAYOUT} E|t*4||L --pipeline-schedule interleaved", 2),
    ],
)
def test_virtual_stages(flags, v):
    """v is given, follows from the layers of a stage or from the layout, and several stages ask for interleaved."""
    args = arguments(f"--pipeline-model-parallel-size 2 {flags}", world_size=2)
    assert args.virtual_pipeline_model_parallel_size == v
    assert args.pipeline_schedule == ("interleaved" if v else "flush")


@pytest.mark.parametrize(
    "flags, message",
    [
        (f"{V} 2 --num-layers-per-virtual-pipeline-stage 1", "exclude each other; keep one"),
        (f"{V} 2 {LAYOUT} Et|t|t|tL", f"{V} and {LAYOUT} exclude each other; keep one"),
        (f"{V} 2 --pipeline-schedule flush", "--pipeline-schedule flush has one stage on each rank, not 2; use inter"),
        (f"{V} 2 --pipeline-schedule bpipe", "bpipe has one stage on each rank, not 2; use interleaved"),
        (f"{V} 1 --pipeline-schedule interleaved", f"add {V} 2 or more, or use flush"),
        (f"{V} 3", "--num-layers 4 is less than the 6 stages of the pipeline; take fewer stages"),
        ("--num-layers-per-virtual-pipeline-stage 3", "the 2 layers of a rank cannot be cut into stages of --num-lay"),
        ("--num-layers 5 --num-layers-per-virtual-pipeline-stage 1", "--num-layers 5 is not divisible by"),
        (
            "--num-layers-per-virtual-pipeline-stage 1 --decoder-last-pipeline-num-layers 1",
            "layers of its own number; use --num-virtual-stages-per-pipeline-rank",
        ),
        (f"{V} 2 --decoder-last-pipeline-num-layers 1", "the 1 layers of the last rank cannot be dealt out to 2"),
        (f"--num-layers 7 {V} 2 --decoder-last-pipeline-num-layers 2", "the 5 layers of the other ranks cannot be"),
        (f"{V} 2 --global-batch-size 5", "make the batch a multiple of 2, or use flush"),
        (f"{V} 2 --rampup-batch-size 1 1 10", "make the batch a multiple of 2, or use flush"),
        (f"{V} 2 --microbatch-group-size-per-virtual-pipeline-stage 1", "smaller than the 2 ranks"),
        (f"{V} 2 --pipeline-extra-warmup", "interleaved has no warm-up that could be extended"),
        (f"{LAYOUT} Et|ttx|tL", "Invalid layer character: x"),
        (f"{LAYOUT} Et|t|ttL", "must be divisible by pipeline_model_parallel_size"),
        (f"{LAYOUT} Et|ttL", "write E, 4 times t and L, with | between stages, as many as 2"),
        (f"{LAYOUT} t|tttL", "The first layer must be embedding"),
        (f"{LAYOUT} Et|ttt", "The last layer must be loss"),
        (f"{LAYOUT} Et|tt|t|mL", "Number of mtp layers in layout"),
        (f"{LAYOUT} |Et|t|ttL", "begins or ends with an empty stage; the first stage holds E and the last one L"),
        (f"{LAYOUT} Et|t|ttL|", "begins or ends with an empty stage"),
        (f"{LAYOUT} Et|tttL --decoder-first-pipeline-num-layers 1", "have nothing to add; leave them out"),
        (f"{LAYOUT} Et|t|t|tL --pipeline-schedule 2bw", "2bw has one stage on each rank, not 2; use interleaved, or"),
    ],
)
def test_virtual_stages_that_cannot_be(flags, message):
    """Flags that contradict each other, layers that do not come out even, and batches that fill no group."""
    with pytest.raises(ValueError) as error:
        arguments(f"--pipeline-model-parallel-size 2 {flags}", world_size=2)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_stages_that_the_schedule_names():
    """zbv has two on each rank, whether the flags say so or not; on one rank that buys nothing, and is refused."""
    flags = "--pipeline-schedule zbv --pipeline-model-parallel-size 2"
    assert arguments(flags, world_size=2).schedule == arguments(f"{flags} {V} 2", world_size=2).schedule
    with pytest.raises(ValueError, match="--pipeline-schedule zbv gives a rank 2 stages, which buys nothing with"):
        arguments("--pipeline-schedule zbv")


@pytest.mark.parametrize(
    ("num_layers", "ranks", "flags", "note"),
    [
        (24, 16, "", "24 on 16 stages: 8 stages of 2, 8 of 1, {} Et|t|t|t|t|t|t|tt|tt|tt|tt|tt|tt|tt|tt|tL"),
        (4, 3, FURTHER, "4 on 3 stages: 1 stage of 2, 2 of 1, {} Et|tt|tmL"),
        (6, 2, f"{V} 2", "6 on 4 stages: 2 stages of 2, 2 of 1, {} Et|tt|tt|tL"),
        (5, 2, "--pipeline-schedule zbv", "5 on 4 stages: 1 stage of 2, 3 of 1, {} Et|t|tt|tL"),
        (
            7, 3, "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --num-layers 6",
            "6 on 3 stages: 1 stage of 3, 1 of 2, 1 of 1, {} Ett|ttt|tL",
        ),
    ],
)  # fmt: skip
def test_layers_that_the_stages_do_not_divide(num_layers, ranks, flags, note):
    """The stages before the last have one more; a note says which, in the flag's own form, which cuts alike."""
    words = f"--num-layers {num_layers} --pipeline-model-parallel-size {ranks} --global-batch-size 32 {flags}"
    args = parse_args(argv(words))
    notes = validate_args(args, world_size=ranks)
    said = f"--num-layers {note.format(LAYOUT)}"
    assert said in notes and args.pipeline_model_parallel_layout is None
    written = f"{words} {said[said.index(LAYOUT) :]}".replace(f"{V} 2", "")
    written = " ".join(word for word in written.split() if "account" not in word)
    cuts = [
        from_flags.layers_of_stages(transformer_config(arguments(each, world_size=ranks))) for each in (words, written)
    ]
    assert cuts[0] == cuts[1] and sum(cuts[0]) == args.num_layers


def test_a_rank_with_nothing_to_hold():
    """Empty stages are for ranks that have others."""
    with pytest.raises(
        ValueError, match="leaves rank 2 of the pipeline nothing to hold; give one of its stages a layer"
    ):
        arguments(f"--pipeline-model-parallel-size 4 {LAYOUT} Ett|t||tL", world_size=4)


def test_schedule_is_checked_for_every_batch_size():
    """2bw needs m >= p in every batch, also at the start of a ramp-up, and says so before anything starts."""
    arguments("--pipeline-schedule 2bw --pipeline-model-parallel-size 4", world_size=4)
    with pytest.raises(ValueError):
        arguments("--pipeline-schedule 2bw --pipeline-model-parallel-size 4 --rampup-batch-size 2 2 100", world_size=4)


def test_layers_of_each_stage_in_a_list():
    """--num-layer-list is a layout; beside one it is refused, and so is what is no list of numbers."""
    listed = arguments("--pipeline-model-parallel-size 2 --num-layer-list 1,3", world_size=2)
    assert listed.pipeline_model_parallel_layout == "Et|tttL"
    with pytest.raises(ValueError, match="--num-layer-list 1;3 must be whole numbers divided by commas"):
        arguments("--num-layer-list 1;3")
    with pytest.raises(ValueError, match="--num-layer-list and --pipeline-model-parallel-layout exclude each other"):
        arguments("--num-layer-list 1,3 --pipeline-model-parallel-layout Et|tttL")
    with pytest.raises(ValueError, match=r"Et\|ttL"):
        arguments("--pipeline-model-parallel-size 2 --num-layer-list 1,2", world_size=2)
