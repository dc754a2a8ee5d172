"""Runs whose replicas share out experts: checkpoints go on at other degrees with all of the optimizer's state."""

import re

import pytest

from tests.trainer.arguments.command_line import arguments
from tests.trainer.run.run_case import table, train
from tests.trainer.run.test_relay import assert_same
from tests.trainer.run.test_experts import DEEP, EXPERTS, PREDICTED, SMOOTH, WIDE, check, numbers

FLAT, ALL = "--pipeline-model-parallel-size 1", "--expert-model-parallel-size 4"
SHARED = "--expert-model-parallel-size 2"
SHARDS = "--use-distributed-optimizer"
TOKENS = "--moe-token-dispatcher-type alltoall"
MUON = f"{SMOOTH} --optimizer muon --muon-fp32-matmul-prec high"
FROZEN = "--freeze-training --freeze-interval 2 --freeze-schedule 1,2"
FLAGS = f"{EXPERTS} {SMOOTH} --pipeline-schedule 2bw"

RESUMED = {  # ranks and flags of the writer and of the reader
    "of one rank by two": (1, "", 2, f"{FLAT} {SHARED}"),
    "of two ranks by one": (2, f"{FLAT} {SHARED}", 1, ""),
    "of shards by stages": (4, f"{DEEP} {SHARED} {SHARDS}", 2, f"{DEEP} {SHARDS}"),
    "of stages by shards": (2, f"{DEEP} {SHARDS}", 4, f"{DEEP} {SHARED} {SHARDS}"),
    "by twice as many": (2, f"{FLAT} {SHARED} {SHARDS}", 4, f"{FLAT} {ALL} {SHARDS} {TOKENS}"),
    "by copies": (4, f"{FLAT} {ALL} {SHARDS}", 4, f"{FLAT} {SHARED} {SHARDS}"),
}


@table(("writers", "written", "readers", "read"), RESUMED, usual=2)
def test_a_checkpoint_goes_on_at_other_degrees(tmp_path, writers, written, readers, read):
    """Weights and moments of experts, in both versions of 2bw: losses are those of a run that was not stopped."""
    whole = train(writers, f"{FLAGS} {written}")
    train(writers, f"{FLAGS} {written} --save {tmp_path} --exit-interval 3")
    found = numbers(train(readers, f"{FLAGS} {read} --load {tmp_path}"))
    for name, expected in numbers(whole).items():
        assert found[name] == pytest.approx(expected[3:], rel=2e-6, abs=0.0)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Flags of a run that starts from the experts of one rank; those of several are drawn apart."""
    folder = tmp_path_factory.mktemp("start")
    train(1, f"{EXPERTS} {SMOOTH} --save {folder} --exit-interval 1")
    return f"{EXPERTS} --load {folder} --finetune"


SAME = {  # flags of both, ranks and flags of the run that shares experts out, and how near it is
    "Muon, owners, 2bw": (f"{MUON} --pipeline-schedule 2bw", 4, f"{DEEP} {SHARED} {SHARDS}"),
    "Muon, two copies, owners": (f"{MUON}", 4, f"{FLAT} {SHARED} {SHARDS} {TOKENS}"),
    "Muon, predicted": (f"{MUON} {PREDICTED}", 4, f"{DEEP} {SHARED} {SHARDS} --2bw-provisional-reduce"),
    "Muon, no owners": (f"{MUON} --pipeline-schedule 2bw", 4, f"{DEEP} {SHARED}"),
    "Muon, whole experts of tensor ranks": (
        f"{MUON} --muon-tp-mode duplicated", 4, f"{FLAT} {SHARED} {WIDE} --expert-tensor-parallel-size 1"),
    "Muon, tensor ranks cut experts": (f"{MUON} --muon-tp-mode duplicated", 4, f"{FLAT} {SHARED} {WIDE} {SHARDS}"),
    "LAMB": (f"{SMOOTH} --optimizer lamb --pipeline-schedule 2bw", 4, f"{DEEP} {SHARED}"),
    "frozen layers": (f"{SMOOTH} {FROZEN}", 4, f"{DEEP} {SHARED} {SHARDS}"),
    "frozen layers, 2bw": (f"{SMOOTH} {FROZEN} --pipeline-schedule 2bw", 4, f"{DEEP} {SHARED}"),
    "predicted weights": (f"{SMOOTH} {PREDICTED}", 4, f"{DEEP} {SHARED} {SHARDS} --2bw-provisional-reduce"),
}


@table(("flags", "ranks", "cut"), SAME, usual=3)
def test_numbers_are_those_of_one_rank(start, flags, ranks, cut):
    """Losses of tokens and of routers, and the weights of all experts."""
    of_one = flags.replace("provisional-microbatches 1", "provisional-microbatches 2")  # as many as of both replicas
    check(train(ranks, f"{start} {flags} {cut}"), train(1, f"{start} {of_one}"), 2e-6)


ON_HOST = {  # ranks, flags of both, and whether every bit is equal
    "bf16": (2, f"--bf16 {FLAT} {SHARED} --clip-grad 0.5", True),
    "two copies of each expert": (4, f"{FLAT} {SHARED} {TOKENS} {SMOOTH}", False),
    "tensor ranks share out whole experts": (
        4, f"{FLAT} {ALL} {WIDE} {SMOOTH} --expert-tensor-parallel-size 1 --swiglu --clip-grad 0.5", True),
    "stages": (4, f"{DEEP} {SHARED} {SMOOTH}", False),
}  # fmt: skip


@table(("ranks", "flags", "exact"), ON_HOST, usual=1)
def test_weights_on_the_host(ranks, flags, exact):
    """Stages whose experts come from the host train as those that stay on the device."""
    relay = "--pipeline-schedule l2l --num-virtual-stages-per-pipeline-rank 2"
    expected, found = (train(ranks, f"{EXPERTS} {flags} {each}") for each in ("--pipeline-recompute", relay))
    if exact:
        assert_same(expected, found)
    else:  # sums of four run in another order
        check(found, expected, 2e-6)


def test_a_stage_has_the_experts_of_all_ranks():
    """The parameters of a stage, as the run says them, do not depend on who holds its experts."""
    runs = train(1, FLAGS), train(2, f"{FLAGS} {FLAT} {SHARED}")
    whole, shared = (re.search(r"parameters per stage .*?;", "".join(run[-1]["lines"])).group() for run in runs)
    assert whole == shared


TWO = "--num-experts 4 --expert-model-parallel-size 2"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--num-experts 4 --expert-model-parallel-size 0", "--expert-model-parallel-size 0 must be"),
        ("--expert-model-parallel-size 2", "is given, and --num-experts is not; give both, or neither"),
        ("--num-experts 3 --expert-model-parallel-size 2", "--num-experts 3 is not divisible by"),
        (f"{TWO} --pipeline-model-parallel-size 4", "2 does not divide the 1 ranks of a stage that share out experts"),
        (f"{TWO} --expert-tensor-parallel-size 2", "is neither 1 nor --tensor-model-parallel-size 1; give one of them"),
    ],
)
def test_what_is_refused(flags, reason):
    with pytest.raises(ValueError) as refused:
        arguments(flags, world_size=4)
    assert reason in str(refused.value)
