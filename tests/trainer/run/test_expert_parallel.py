"""Runs whose replicas share out experts: checkpoints go on at other degrees with all of the optimizer's state."""

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from megatron import backend

backend.install()

from megatron.trainer.checkpoint.optimizer_state import master_of
from megatron.trainer.ranks import StopSignal
from megatron.trainer.run.loop import Loop
from tests.trainer.arguments.command_line import arguments
from tests.trainer.run.run_case import table, train
from tests.trainer.run.test_experts import DEEP, EXPERTS, PREDICTED, SMOOTH, WIDE, check, numbers
from tests.trainer.run.test_relay import assert_same

FLAT, ALL = "--pipeline-model-parallel-size 1", "--expert-model-parallel-size 4"
SHARED = "--expert-model-parallel-size 2"
SHARDS = "--use-distributed-optimizer"
TOKENS = "--moe-token-dispatcher-type alltoall"
MUON = f"{SMOOTH} --optimizer muon --muon-fp32-matmul-prec high"
FROZEN = "--freeze-training --freeze-interval 2 --freeze-schedule 1,2"
RELAY, FLUSH = "--pipeline-schedule l2l", "--pipeline-schedule flush"
FLAGS = f"{EXPERTS} {SMOOTH} --pipeline-schedule 2bw"

APART, REDUCED = PREDICTED, "--2bw-provisional-reduce"

RESUMED = {  # ranks and flags of the writer and of the reader
    "of one rank by two": (1, "", 2, f"{FLAT} {SHARED}"),
    "of two ranks by one": (2, f"{FLAT} {SHARED}", 1, ""),
    "of shards by stages": (4, f"{DEEP} {SHARED} {SHARDS}", 2, f"{DEEP} {SHARDS}"),
    "of stages by shards": (2, f"{DEEP} {SHARDS}", 4, f"{DEEP} {SHARED} {SHARDS}"),
    "by twice as many": (2, f"{FLAT} {SHARED} {SHARDS}", 4, f"{FLAT} {ALL} {SHARDS} {TOKENS}"),
    "by copies": (4, f"{FLAT} {ALL} {SHARDS}", 4, f"{FLAT} {SHARED} {SHARDS}"),
    "of plain ones by shards": (2, f"{FLAT} {SHARED}", 4, f"{DEEP} {SHARED} {SHARDS}"),
    "of shards by one rank": (4, f"{FLAT} {SHARED} {SHARDS}", 1, ""),
    "of one rank by shards": (1, "", 4, f"{FLAT} {ALL} {SHARDS}"),
    "Muon, of owners by one rank": (4, f"{FLAT} {SHARED} {SHARDS} {MUON}", 1, MUON),
    "weights on the host, by stages": (
        2,
        f"{FLAT} {SHARED} {TOKENS} {RELAY}",
        4,
        f"{DEEP} {SHARED} {RELAY} --num-virtual-stages-per-pipeline-rank 2",
    ),
    "weights on the host, by those on the device": (4, f"{DEEP} {SHARED} {RELAY}", 2, f"{FLAT} {SHARED} {FLUSH}"),
    "frozen layers, of shards by plain ones": (4, f"{DEEP} {SHARED} {SHARDS} {FROZEN}", 4, f"{DEEP} {SHARED} {FROZEN}"),
    "frozen layers, by other stages": (2, f"{FLAT} {SHARED} {FROZEN} {FLUSH}", 4, f"{DEEP} {SHARED} {FROZEN} {FLUSH}"),
    "predictions apart": (4, f"{FLAT} {SHARED} {APART}", 4, f"{FLAT} {SHARED} {APART}"),
    "predictions, by stages with whole experts": (
        4,
        f"{FLAT} {SHARED} {APART} {REDUCED} --global-batch-size 8",
        4,
        f"{DEEP} {APART.replace('microbatches 1', 'microbatches 2')} {REDUCED} --global-batch-size 8",
    ),
}


HELD = {  # of a run that SIGTERM ends: ranks and flags; ranks and flags of those that read and write again
    "shards": (4, f"{DEEP} {SHARED} {SHARDS}", (
        (1, FLAT), (4, f"{FLAT} {SHARED} {WIDE} --expert-tensor-parallel-size 1"))),
    "shards, others": (4, f"{DEEP} {SHARED} {SHARDS}", ((2, f"{FLAT} {SHARED}"), (4, f"{FLAT} {ALL} {SHARDS}"))),
    "bf16, one rank": (1, "--bf16", ((4, f"--bf16 {DEEP} {SHARED} {SHARDS}"), (2, f"--bf16 {FLAT} {SHARED}"))),
    "bf16, shards": (4, f"--bf16 {FLAT} {SHARED} {SHARDS}", ((1, "--bf16"), (4, f"--bf16 {FLAT} {ALL}"))),
    "plain": (2, f"{FLAT} {SHARED}", ((4, f"{FLAT} {ALL} {SHARDS}"), (2, f"{FLAT} {SHARDS}"))),
    "Muon, owners": (4, f"{DEEP} {SHARED} {SHARDS} {MUON}", ((2, f"{FLAT} {SHARED} {MUON}"), (1, f"{FLAT} {MUON}"))),
}  # fmt: skip


def write_again(run) -> Callable[[], None]:
    """Save what a run has loaded, before it trains."""
    Loop(run, StopSignal(), started=time.time()).save()
    return lambda: None


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Key -> whole tensor. A master has the key of its weight, with a prefix; in FP32 each weight is its own master."""
    found: dict[str, torch.Tensor] = {}
    reader, planner = FileSystemReader(str(checkpoint)), _EmptyStateDictLoadPlanner()
    _load_state_dict(found, storage_reader=reader, planner=planner, no_dist=True)
    tensors = {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}
    moments = [f"optimizer.state.{moment}." for moment in ("exp_avg", "momentum_buffer")]
    weights = {key: value for key, value in tensors.items() if any(each + key in tensors for each in moments)}
    masters = {f"master.{master}": tensors.pop(key) for key in [*tensors] if (master := master_of(key))}
    return {f"master.{key}": value for key, value in weights.items()} | tensors | masters


@table(("ranks", "written", "readers"), HELD, usual=1)
def test_every_bit_of_a_checkpoint_arrives_at_other_degrees(tmp_path, ranks, written, readers):
    """Weights, both versions of 2bw, masters and moments: what is loaded and saved again is what was saved."""
    train(ranks, f"{FLAGS} {written} --save {tmp_path}/first", stop_after={ranks - 1: 1})
    iteration = (tmp_path / "first" / "latest_checkpointed_iteration.txt").read_text()
    name = f"iter_{int(iteration):07d}"
    expected = tensors_of(tmp_path / "first" / name)
    moment = "momentum_buffer" if "muon" in written else "exp_avg"
    assert expected[f"optimizer.state.{moment}.decoder.layers.mlp.experts.experts.linear_fc1.weight"].count_nonzero()
    assert any(key.startswith("previous_version.") for key in expected)
    for number, (others, read) in enumerate(readers):
        again = tmp_path / f"again{number}"
        loading = f"--load {tmp_path}/first --save {again} --exit-interval 1"
        train(others, f"{FLAGS} {read} {loading}", watch=f"{__name__}:{write_again.__name__}")
        found = tensors_of(again / name)
        assert found.keys() == expected.keys()
        assert not [key for key, tensor in expected.items() if not torch.equal(found[key], tensor)], read


@pytest.mark.full
@table(("writers", "written", "readers", "read"), RESUMED, usual=1)
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
    "Muon, predicted": (f"{MUON} {PREDICTED}", 4, f"{DEEP} {SHARED} {SHARDS} {REDUCED}"),
    "Muon, two copies, owners": (f"{MUON}", 4, f"{FLAT} {SHARED} {SHARDS} {TOKENS}"),
    "Muon, owners, 2bw": (f"{MUON} --pipeline-schedule 2bw", 4, f"{DEEP} {SHARED} {SHARDS}"),
    "Muon, no owners": (f"{MUON} --pipeline-schedule 2bw", 4, f"{DEEP} {SHARED}"),
    "Muon, whole experts of tensor ranks": (
        f"{MUON} --muon-tp-mode duplicated",
        4,
        f"{FLAT} {SHARED} {WIDE} --expert-tensor-parallel-size 1",
    ),
    "Muon, tensor ranks cut experts": (f"{MUON} --muon-tp-mode duplicated", 4, f"{FLAT} {SHARED} {WIDE} {SHARDS}"),
    "LAMB": (f"{SMOOTH} --optimizer lamb --pipeline-schedule 2bw", 4, f"{DEEP} {SHARED}"),
    "frozen layers": (f"{SMOOTH} {FROZEN}", 4, f"{DEEP} {SHARED} {SHARDS}"),
    "frozen layers, 2bw": (f"{SMOOTH} {FROZEN} --pipeline-schedule 2bw", 4, f"{DEEP} {SHARED}"),
    "predicted weights": (f"{SMOOTH} {PREDICTED}", 4, f"{DEEP} {SHARED} {SHARDS} {REDUCED}"),
}


@table(("flags", "ranks", "cut"), SAME, usual=1)
def test_numbers_are_those_of_one_rank(start, flags, ranks, cut):
    """Losses of tokens and of routers, and the weights of all experts."""
    of_one = flags.replace("provisional-microbatches 1", "provisional-microbatches 2")  # as many as of both replicas
    check(train(ranks, f"{start} {flags} {cut}"), train(1, f"{start} {of_one}"), 1e-6)


ON_HOST = {  # ranks, flags of both, and whether every bit is equal
    "bf16": (2, f"--bf16 {FLAT} {SHARED} --clip-grad 0.5", True),
    "two copies of each expert": (4, f"{FLAT} {SHARED} {TOKENS} {SMOOTH}", False),
    "tensor ranks share out whole experts": (
        4, f"{FLAT} {ALL} {WIDE} {SMOOTH} --expert-tensor-parallel-size 1 --swiglu --clip-grad 0.5", True),
    "stages": (4, f"{DEEP} {SHARED} {SMOOTH}", False),
}  # fmt: skip


@table(("ranks", "flags", "exact"), ON_HOST, usual=0)
def test_weights_on_the_host(ranks, flags, exact):
    """Stages whose experts come from the host train as those that stay on the device."""
    relay = "--pipeline-schedule l2l --num-virtual-stages-per-pipeline-rank 2"
    expected, found = (train(ranks, f"{EXPERTS} {flags} {each}") for each in ("--pipeline-recompute", relay))
    if exact:
        assert_same(expected, found)
    else:  # sums of four run in another order
        check(found, expected, 2e-6)


@pytest.mark.full
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
        (
            "--num-experts 4 --disable-bias-linear --tensor-model-parallel-size 4 --sequence-parallel "
            "--expert-tensor-parallel-size 1 --expert-model-parallel-size 2",
            "would leave copies of an expert on the 4 tensor ranks, and copies are summed over replicas alone; raise",
        ),
        (f"{TWO} --expert-tensor-parallel-size 2", "is neither 1 nor --tensor-model-parallel-size 1; give one of them"),
    ],
)
def test_what_is_refused(flags, reason):
    with pytest.raises(ValueError) as refused:
        arguments(flags, world_size=4)
    assert reason in str(refused.value)
