"""`--pipeline-schedule l2l` on the command line: what follows, and what is refused with which sentence."""

import pytest

from megatron.pipeline.program.lane_order import Residency
from megatron.trainer.arguments import parse_args, platform, validate_args
from tests.trainer.arguments.command_line import GPU, arguments, argv

L2L = "--pipeline-schedule l2l"
P2 = "--pipeline-model-parallel-size 2"


@pytest.mark.parametrize(
    ("flags", "world_size", "rank_of_stage", "residency"),
    [
        ("", 1, (0, 0, 0, 0), Residency(2, "deferred")),
        ("--clip-grad 0", 1, (0, 0, 0, 0), Residency(2, "eager")),
        ("--clip-grad 0 --fp16", 1, (0, 0, 0, 0), Residency(2, "deferred")),
        ("--clip-grad 0 --l2l-update deferred --l2l-resident-stages 3", 1, (0, 0, 0, 0), Residency(3, "deferred")),
        (P2, 2, (0, 1, 0, 1), Residency()),
        (f"{P2} --l2l-stash host", 2, (0, 1, 0, 1), Residency(2, "deferred", "host")),
        (f"{P2} --num-virtual-stages-per-pipeline-rank 1", 2, (0, 1), Residency()),
        ("--num-layers-per-virtual-pipeline-stage 2", 1, (0, 0), Residency()),
        ("--pipeline-model-parallel-layout E|tttt|L", 1, (0, 0, 0), Residency()),
        ("--num-virtual-stages-per-pipeline-rank 1", 1, (0,), Residency()),
    ],
)
def test_a_layer_is_a_stage_unless_the_flags_say_otherwise(flags, world_size, rank_of_stage, residency):
    """Stages are dealt out in turn; updates are eager where nothing depends on all gradients together."""
    schedule = arguments(f"{L2L} {flags}", world_size=world_size).schedule
    assert (schedule.rank_of_stage, schedule.residency) == (rank_of_stage, residency)
    assert schedule.tied_embeddings == (len(rank_of_stage) > 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{L2L} --l2l-update eager", "--l2l-update eager updates a stage before all gradients are known, and --clip-"),
        (f"{L2L} --l2l-update eager --clip-grad 0 --fp16", "and --fp16 depends on them all; use deferred, or leave"),
        (f"{L2L} --use-distributed-optimizer", "shards the optimizer's state on the devices, and here each replica's"),
        (
            f"{L2L} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "--recompute-granularity full does not go with --pipeline-schedule l2l: it recomputes within what is",
        ),
        (f"{L2L} --balance-activations", "--balance-activations does not go with --pipeline-schedule l2l: it moves"),
        (f"{L2L} --pipeline-extra-warmup", "it extends a warm-up, and stages in turn have none; leave it out"),
        (f"{L2L} --microbatch-group-size-per-virtual-pipeline-stage 4", "it cuts a batch into groups"),
        (f"{L2L} --log-saved-activations", "it counts what graphs hold, and cannot tell it from weights"),
        (f"{L2L} --dry-run-host-memory 64", "--dry-run-host-memory needs --dry-run, the number of GPUs of the job"),
        ("--dry-run 1 --dry-run-host-memory 64", "is for weights on the host, and --pipeline-schedule flush has them"),
        (f"{L2L} --dry-run 1 --dry-run-host-memory 0", "--dry-run-host-memory 0.0 must be greater than 0"),
        (f"{L2L} --2bw-single-gradient-buffer", "--2bw-single-gradient-buffer needs --pipeline-schedule 2bw"),
        (f"{L2L} --2bw-provisional stage", "goes with the weights of --pipeline-schedule 2bw, not l2l"),
        (f"{L2L} --l2l-resident-stages 0", "--l2l-resident-stages 0 must be greater than 0"),
        (f"{L2L} --use-precision-aware-optimizer --optimizer sgd", "does not go with --optimizer sgd; use adam"),
        (f"{L2L} --optimizer-cpu-offload", "--optimizer-cpu-offload"),
        (
            f"{L2L} --num-virtual-stages-per-pipeline-rank 5",
            "--num-layers 4 is less than the 5 stages of the pipeline; take fewer stages",
        ),
        ("--l2l-update eager", "is about weights on the host, and --pipeline-schedule flush has them on the device"),
        ("--l2l-resident-stages 2", "--l2l-resident-stages 2 is about weights on the host"),
        (f"{L2L} --l2l-fetch shares", "gathers a stage's weights from replicas on the node, and there is one replica"),
        ("--l2l-fetch whole", "--l2l-fetch whole is about weights on the host"),
        ("--l2l-stash host", "--l2l-stash host is about weights on the host, and --pipeline-schedule flush has them"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(flags, message):
    """With value, reason and remedy."""
    with pytest.raises(ValueError) as error:
        arguments(flags)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_on_a_gpu_the_host_steps():
    """With a kernel of torch's, and nothing adds to gradients beside what carries them to the host."""
    args = parse_args(argv(f"{L2L} --optimizer-kernel fused"))
    validate_args(args, world_size=1)
    notes = platform.resolve_platform(args, GPU)
    assert not args.gradient_accumulation_fusion
    assert "gradient_accumulation_fusion is off: l2l carries gradients to the host stage by stage" in notes
