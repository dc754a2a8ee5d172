"""--optimizer muon in training: torch's own numbers, however the job is cut, and what is refused."""

from unittest import mock

import pytest
import torch

from megatron.pipeline.runtime.update import muon as rule
from megatron.trainer.arguments.flags.training import REGULARIZATION
from tests import workers
from tests.trainer.arguments.command_line import arguments
from tests.trainer.checkpoint.test_stages import check_cut, saved  # noqa: F401  a fixture
from tests.trainer.run.run_case import data_flags, joined_weights, table, train, train_case
from tests.trainer.run.test_relay import FLUSH, FP16, L2L, P1, P2, P4, UNTIED

FULL = pytest.mark.full
MUON = f"{UNTIED} --optimizer muon --muon-extra-scale-factor 0.2"
UNCLIPPED = f"{MUON} --clip-grad 0"
TORCHS = "--muon-coefficient-type simple --muon-scale-mode spectral --muon-use-nesterov --muon-no-split-qkv"
IN_FP32 = "--muon-fp32-matmul-prec high --lr 1e-3 --hidden-dropout 0 --attention-dropout 0"
TENSOR = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64"
TWO_BW = "--pipeline-schedule 2bw"
UNIFORM = f"{TWO_BW} --2bw-provisional uniform --2bw-provisional-microbatches 1"


class OfTorch(torch.optim.Optimizer):
    """torch.optim.Muon and torch.optim.AdamW in the place of ours: only their groups are told from ours."""

    def __init__(self, groups, *, momentum, nesterov, orthogonalization):
        super().__init__(groups, {"muon": None, "lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8})
        self.momentum, self.nesterov, self.optimizers = momentum, nesterov, {}

    def step(self, closure=None):
        for index, group in enumerate(self.param_groups):
            if not group["params"]:
                continue
            if index not in self.optimizers:
                if group["muon"] is None:
                    made = torch.optim.AdamW(group["params"], betas=group["betas"], eps=group["eps"])
                else:
                    made = torch.optim.Muon(
                        group["params"], momentum=self.momentum, nesterov=self.nesterov,
                        adjust_lr_fn="match_rms_adamw",
                    )  # fmt: skip
                self.optimizers[index] = made
            inner = self.optimizers[index]
            inner.param_groups[0].update(lr=group["lr"], weight_decay=group["weight_decay"])
            inner.step()


def train_with_torchs(flags: str) -> dict:
    from megatron.trainer.start_up import optimizer

    with mock.patch.object(optimizer, "Muon", OfTorch):
        return train_case(flags)


@pytest.mark.parametrize("model", ["--clip-grad 0.5", pytest.param("--clip-grad 0 --bf16", marks=FULL)])
def test_steps_are_torchs(model):
    """A run on one rank and one on two have the weights of torch.optim.Muon and torch.optim.AdamW, bit for bit where
    nothing clips, whose norm is summed in another order over ranks."""
    flags = f"{MUON} {TORCHS} {model} --weight-decay 0.1 --lr-warmup-iters 2"
    alone = f"{flags} {FLUSH} {P1} {data_flags()}"
    expected = joined_weights(workers.run(1, f"{__name__}:train_with_torchs", flags=alone))
    for num_ranks, cut in ((1, P1), (2, P2)):
        found = joined_weights(train(num_ranks, f"{flags} {FLUSH} {cut}"))
        for name, weight in expected.items():
            assert torch.equal(found[name], weight), (cut, name)


# name: (flags of both, ranks, the cut and the schedule beside flush or 2bw in one process, what is compared with)
SAME_BITS = {
    "2bw on two ranks": (UNCLIPPED, 2, f"{P2} {TWO_BW}", TWO_BW),
    "l2l": (UNCLIPPED, 1, f"{P1} {L2L}", FLUSH),
    "provisional": (f"{UNCLIPPED} --bf16", 2, f"{P2} {UNIFORM}", UNIFORM),
    "four ranks": (UNCLIPPED, 4, f"{P4} {FLUSH}", FLUSH),
    "gpipe": (UNCLIPPED, 2, f"{P2} --pipeline-schedule gpipe", FLUSH),
    "bpipe": (f"{UNCLIPPED} --num-layers 4", 4, f"{P4} --pipeline-schedule bpipe", FLUSH),
    "interleaved": (UNCLIPPED, 2, f"{P2} --num-virtual-stages-per-pipeline-rank 2", FLUSH),
    "zero bubble": (UNCLIPPED, 2, f"{P2} --pipeline-schedule zbv", FLUSH),
    "FP16 that overflows": (f"{UNCLIPPED} {FP16} --train-iters 6", 2, f"{P2} {FLUSH}", FLUSH),
    "FP16 on the host": (f"{UNCLIPPED} {FP16} --train-iters 6", 1, f"{P1} {L2L}", FLUSH),
    "learning rates of its own": (
        f"{UNCLIPPED} --muon-scalar-lr 1e-3 --muon-scalar-min-lr 1e-4 --decoupled-lr 3e-3 --lr-decay-style cosine",
        2, f"{P2} {FLUSH}", FLUSH,
    ),
}  # fmt: skip


@pytest.mark.full
@table("flags, num_ranks, cut, alone", SAME_BITS, usual=1)
def test_one_result_however_the_job_is_cut(flags, num_ranks, cut, alone):
    """Bit for bit: a matrix lies on one rank, whatever the schedule."""
    expected = joined_weights(train(1, f"{flags} {P1} {alone}"))
    found = joined_weights(train(num_ranks, f"{flags} {cut}"))
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


def by_tensor_rank(gated: torch.Tensor) -> torch.Tensor:
    """The rows of a gated layer, the gate above the rest, as two tensor ranks have them below one another."""
    return gated.view(2, 2, -1, *gated.shape[1:]).transpose(0, 1).reshape(gated.shape)


@pytest.mark.parametrize(
    "num_ranks, cut",
    [
        pytest.param(2, f"{P1} {TENSOR} --muon-tp-mode duplicated", id="gathered"),
        pytest.param(2, f"{P1} {TENSOR} --muon-tp-mode duplicated --sequence-parallel", id="sequences", marks=FULL),
        pytest.param(2, P1, id="replicas", marks=FULL),
        pytest.param(4, f"{P2} {TENSOR} --muon-tp-mode duplicated", id="gathered on a pipeline", marks=FULL),
    ],
)
@pytest.mark.full
def test_other_degrees_differ_by_rounding(num_ranks, cut):
    """With the iteration in FP32; gradients are summed in another order, and rows of a gate stand in another."""
    flags = f"{UNCLIPPED} {IN_FP32} --swiglu {FLUSH}"
    expected = joined_weights(train(1, f"{flags} {P1} --make-vocab-size-divisible-by 128"))
    found = joined_weights(train(num_ranks, f"{flags} {cut}"))
    for name, weight in expected.items():
        if "linear_fc1" in name and TENSOR in cut:
            weight = by_tensor_rank(weight)
        torch.testing.assert_close(found[name], weight, rtol=0, atol=2e-6)


@FULL
def test_blocks_are_another_algorithm():
    """Each tensor rank by itself: not the whole matrix's numbers."""
    flags = f"{UNCLIPPED} {IN_FP32} {FLUSH}"
    expected = joined_weights(train(1, f"{flags} {P1} --make-vocab-size-divisible-by 128"))
    found = joined_weights(train(2, f"{flags} {P1} {TENSOR}"))
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    assert (found[name] - expected[name]).abs().max() > 1e-3


# name: (flags of both, ranks, cut of the run that saves, ranks, cut of the run that goes on)
CUTS = {
    "to two ranks": ("", 1, f"{P1} {FLUSH}", 2, f"{P2} {FLUSH}"),
    "from 2bw's two versions": ("--bf16", 2, f"{P2} {TWO_BW}", 1, f"{P1} {TWO_BW}"),
    "to the host": ("--bf16", 2, f"{P2} {FLUSH}", 1, f"{P1} {L2L}"),
    "from the host": ("--bf16", 1, f"{P1} {L2L}", 1, f"{P1} {FLUSH}"),
    "with predictions": ("--bf16", 2, f"{P2} {UNIFORM}", 2, f"{P2} {UNIFORM}"),
    "FP16, learning rates": (
        f"{FP16} --train-iters 6 --muon-scalar-lr 1e-3 --decoupled-lr 3e-3", 2, f"{P2} {FLUSH}", 1, f"{P1} {FLUSH}",
    ),
}  # fmt: skip


@table("flags, writers, source, readers, target", CUTS, usual=1)
def test_checkpoints_go_on_elsewhere(saved, flags, writers, source, readers, target):  # noqa: F811
    """With one moment of a matrix, two of the rest, and a counter of steps that all have in common."""
    check_cut(saved, f"{UNCLIPPED} {flags}", writers, source, readers, target, exact=True)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--muon-scalar-lr 1e-5 --min-lr 1e-4 --lr 1e-3", "--min-lr 0.0001 is greater than --muon-scalar-lr 1e-05"),
        (
            f"--muon-tp-mode duplicated --tensor-model-parallel-size 2 {L2L}",
            "--muon-tp-mode duplicated does not go with --pipeline-schedule l2l and tensor parallelism",
        ),
        (
            "--tensor-model-parallel-size 2 --group-query-attention --num-query-groups 1",
            "--tensor-model-parallel-size 2 gives each rank a part of one of 1 query groups",
        ),
        ("--muon-tp-mode distributed", "--muon-tp-mode distributed, which iterates on shared matrices"),
        ("--muon-num-ns-steps 0", "--muon-num-ns-steps 0 must be greater than 0"),
        ("--muon-momentum 1", "--muon-momentum 1.0 must be at least 0 and less than 1"),
        ("--muon-extra-scale-factor 0", "--muon-extra-scale-factor 0.0 must be greater than 0"),
        ("--muon-scalar-optimizer lion", "AdamW steps what Muon does not"),
        ("--muon-scalar-lr 1e-3 --muon-scalar-min-lr 1e-2", "--muon-scalar-min-lr 0.01 is greater than"),
    ],
)
def test_what_is_refused(flags, message):
    """In a sentence, at the start."""
    with pytest.raises(ValueError) as caught:
        arguments(f"--optimizer muon {flags}", world_size=2)
    assert message in str(caught.value)


def test_choices_are_the_tables():
    """The flags' choices, which are written without torch, are the rows of the optimizer's tables."""
    choices = {flag.dest: flag.choices for flag in REGULARIZATION.flags}
    assert choices["muon_coefficient_type"] == tuple(rule.COEFFICIENTS)
    assert choices["muon_scale_mode"] == tuple(rule.SCALES)
