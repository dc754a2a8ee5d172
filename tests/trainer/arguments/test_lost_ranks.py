"""`--go-on-without-lost-ranks` on the command line: what goes with it, and what is refused with which sentence."""

from collections import Counter

import pytest

from megatron.trainer.arguments.flags.config import num_places, ranks_of_place, replicas_of_place
from megatron.trainer.run.places import part_of, place_of, shared_out
from tests.trainer.arguments.bert_command_line import bert_arguments
from tests.trainer.arguments.command_line import CPU, GPU, arguments
from tests.trainer.arguments.t5_command_line import t5_arguments
from tests.trainer.run.text_helper import text_arguments
from tests.trainer.run.vision_helper import vision_arguments

GO_ON = "--go-on-without-lost-ranks"
TWO = {"world_size": 2}
FP8 = "--hidden-size 64 --seq-length 64 --max-position-embeddings 64 --fp8-format hybrid"


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--pipeline-schedule 2bw",
        "--pipeline-schedule 2bw --2bw-provisional stage --2bw-provisional-reduce",
        "--pipeline-schedule 2bw --2bw-provisional stage --2bw-provisional-reduce --use-distributed-optimizer",
        "--pipeline-schedule 2bw --2bw-error-feedback",
        "--pipeline-schedule 2bw --2bw-error-feedback --use-distributed-optimizer --redundant-optimizer",
        "--pipeline-schedule 2bw --2bw-error-feedback --use-distributed-optimizer --optimizer muon",
        "--pipeline-schedule zb-h1",
        "--bf16",
        "--log-saved-activations --pipeline-timeline x",
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--context-parallel-size 2",
        "--rampup-batch-size 4 4 24",
        "--optimizer sgd",
        "--save x --async-save",
        "--optimizer lamb",
        "--optimizer muon --use-distributed-optimizer",
        "--use-distributed-optimizer --bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16",
        "--num-experts 2 --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-2 1e-2",
        "--num-experts 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        "--num-experts 2 --disable-bias-linear --tensor-model-parallel-size 2 --sequence-parallel",
        "--num-experts 2 --context-parallel-size 2",
        "--num-experts 2 --expert-model-parallel-size 2",
        "--num-experts 2 --expert-model-parallel-size 2 --optimizer muon",
        "--num-experts 2 --expert-model-parallel-size 2 --use-distributed-optimizer --redundant-optimizer",
        "--optimizer muon --tensor-model-parallel-size 2 --muon-tp-mode blockwise",
        "--optimizer muon --context-parallel-size 2",
        f"{FP8} --fp8-recipe tensorwise --distributed-backend gloo",
        f"{FP8} --fp8-recipe blockwise --tensor-model-parallel-size 2 --sequence-parallel --distributed-backend gloo",
    ],
)
def test_replicas_of_a_pipeline_go_on(flags):
    """Two stages, and replicas; how long a rank may be silent, and how slow the job may become, have defaults."""
    platform = GPU if FP8 in flags else CPU
    args = arguments(f"{GO_ON} {flags} --pipeline-model-parallel-size 2", world_size=8, platform=platform)
    assert args.go_on_without_lost_ranks and (args.failure_timeout, args.minimum_speed) == (10.0, 0.0)
    args = arguments(f"{GO_ON} --failure-timeout 1 --minimum-speed 1", **TWO)
    assert (args.failure_timeout, args.minimum_speed) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("flags", "world_size", "message"),
    [
        ("", 1, "one replica leaves nobody with the weights of a lost rank"),
        ("--tensor-model-parallel-size 2", 2, "one replica leaves nobody with the weights of a lost rank"),
        ("--num-experts 2 --expert-model-parallel-size 2", 2,
         "--expert-model-parallel-size and one copy of each expert leaves nobody with the experts of a lost rank"),
        ("--num-experts 2 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-2", 2,
         "--moe-router-load-balancing-type global_aux_loss counts tokens over all replicas before each backward"),
        ("--use-distributed-optimizer --redundant-optimizer --bf16 --use-precision-aware-optimizer", 2,
         "--redundant-optimizer and --use-precision-aware-optimizer would need copies that keep moments of 16 bits"),
        ("--use-distributed-optimizer --redundant-optimizer --optimizer muon", 2,
         "--redundant-optimizer and another --optimizer than adam would need copies of whole parameters, and only"),
        ("--pipeline-schedule l2l", 2, "weights on the host steps them in place and in parts, one for each"),
        ("--pipeline-schedule pipedream --clip-grad 0 --global-batch-size 2 --untie-embeddings-and-output-weights"
         " --pipeline-model-parallel-size 2", 4, "stashed weights needs weights that follow from"),
        ("--pipeline-schedule 2bw --2bw-provisional uniform --2bw-provisional-microbatches 1 "
         "--pipeline-model-parallel-size 2", 4,
         "predictions of each replica alone loses that of a lost rank: add --2bw-provisional-reduce, or"),
        ("--optimizer muon --tensor-model-parallel-size 2 --muon-tp-mode duplicated", 4,
         "--muon-tp-mode duplicated on several tensor ranks gathers matrices in the middle of a step, which a loss"),
        ("--pipeline-schedule 2bw --2bw-single-gradient-buffer", 2,
         "--2bw-single-gradient-buffer steps before it knows the sums that others may lack"),
        (FP8, 2, "--fp8-recipe delayed moves scales on with each microbatch, and has none to return to when a batch"),
        (f"{FP8} --fp8-recipe tensorwise --tensor-model-parallel-size 2 --sequence-parallel", 4,
         "--fp8-recipe tensorwise and --sequence-parallel has a group of tensor ranks in each quantizer, which would"),
        ("--optimistic-steps --pipeline-model-parallel-size 2", 4, "--optimistic-steps may have to take a step back"),
        ("--distributed-backend nccl", 2, "--distributed-backend nccl has not been shown to end NCCL's waits: give"),
    ],
)  # fmt: skip
def test_what_cannot_go_on_is_refused(flags, world_size, message):
    """Each reason in one sentence, with the remedy."""
    with pytest.raises(ValueError) as refusal:
        arguments(f"{GO_ON} {flags}", world_size=world_size)
    assert str(refusal.value).startswith(f"{GO_ON}: a run with {message}"), refusal.value
    assert "\n" not in str(refusal.value)


def test_every_program_goes_on():
    """Whatever the architecture."""
    assert bert_arguments(GO_ON, **TWO).go_on_without_lost_ranks
    assert t5_arguments(GO_ON, **TWO).go_on_without_lost_ranks
    assert text_arguments(GO_ON, **TWO).go_on_without_lost_ranks
    assert vision_arguments(GO_ON, **TWO).go_on_without_lost_ranks


def test_the_distributed_optimizer_goes_with_copies_and_without():
    """Without copies a run that loses a rank goes back to its last checkpoint."""
    assert not arguments(f"{GO_ON} --use-distributed-optimizer", **TWO).redundant_optimizer
    assert arguments(f"{GO_ON} --use-distributed-optimizer --redundant-optimizer", **TWO).redundant_optimizer


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--use-distributed-optimizer --redundant-optimizer",
         "--redundant-optimizer is for --go-on-without-lost-ranks; give both or neither"),
        (f"{GO_ON} --redundant-optimizer",
         "--redundant-optimizer keeps copies of shards, and without --use-distributed-optimizer each replica has the"),
        ("--failure-timeout 5", "--failure-timeout is for --go-on-without-lost-ranks; give both or neither"),
        ("--minimum-speed 0.5", "--minimum-speed is for --go-on-without-lost-ranks; give both or neither"),
        (f"{GO_ON} --failure-timeout 0.9", "--failure-timeout 0.9 must be at least 1"),
        (f"{GO_ON} --minimum-speed 1.1", "--minimum-speed 1.1 must be at least 0 and at most 1"),
    ],
)  # fmt: skip
def test_values_that_mean_nothing_are_refused(flags, message):
    """How to lose ranks is said only where ranks may be lost, and in its range."""
    with pytest.raises(ValueError, match=message):
        arguments(flags, **TWO)


TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel --disable-bias-linear"
CONTEXT = "--context-parallel-size 2"


@pytest.mark.parametrize(
    ("flags", "ranks", "replicas", "num"),
    [
        ("", 1, 1, 16),
        (f"{TENSOR} {CONTEXT}", 4, 1, 4),
        ("--num-experts 4", 1, 1, 16),
        ("--num-experts 4 --expert-model-parallel-size 4", 4, 4, 4),
        (f"--num-experts 4 {TENSOR} --expert-model-parallel-size 2", 4, 2, 4),
        (f"--num-experts 4 {TENSOR} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1", 2, 1, 8),
        (f"--num-experts 4 {CONTEXT} --expert-model-parallel-size 2", 2, 1, 8),
        (f"--num-experts 4 {TENSOR} {CONTEXT} --expert-model-parallel-size 4", 8, 2, 2),
    ],
)
def test_who_is_lost_together(flags, ranks, replicas, num):
    """Places of so many ranks of so many replicas, for the ranks of two stages: each place has all weights of its stage
    once for each of its copies."""
    args = arguments(f"{GO_ON} {flags} --pipeline-model-parallel-size 2 --global-batch-size 16", world_size=32)
    assert (ranks_of_place(args), replicas_of_place(args), num_places(args)) == (ranks, replicas, num)
    of_stage = [{part_of(args, rank) for rank in range(32) if place_of(args, rank).rank == stage} for stage in (0, 1)]
    places = {place_of(args, rank) for rank in range(32)}
    assert len(places) == 2 * num
    for place in places:
        assert {part_of(args, rank) for rank in range(32) if place_of(args, rank) == place} == of_stage[place.rank]


@pytest.mark.parametrize(
    ("flags", "dense", "experts"),
    [
        ("--num-experts 4", 16, None),
        (f"{TENSOR} {CONTEXT}", 8, None),
        ("--num-experts 4 --expert-model-parallel-size 4", 16, 4),
        (f"--num-experts 4 {TENSOR} --expert-model-parallel-size 2", 8, 4),
        (f"--num-experts 4 {TENSOR} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1", 8, 8),
        (f"--num-experts 4 {TENSOR} {CONTEXT} --expert-model-parallel-size 4", 8, 2),
    ],
)
def test_who_shares_out_the_optimizer(flags, dense, experts):
    """So many ranks have shards of the same dense weights and of the same experts. Those of a place have equally many
    of each, and with shards of experts have the same weights."""
    args = arguments(f"{GO_ON} {flags} --pipeline-model-parallel-size 2 --global-batch-size 16", world_size=32)
    of_ranks = [shared_out(args, rank) for rank in range(32)]
    for kind, size in enumerate([dense] if experts is None else [dense, experts]):
        counts = Counter(each[kind] for each in of_ranks)
        assert set(counts.values()) == {size}
        of_places = Counter((place_of(args, rank), each[kind]) for rank, each in enumerate(of_ranks))
        assert set(of_places.values()) == {size // num_places(args)}
    assert all(len(each) == 1 + (experts is not None) for each in of_ranks)
