"""`--optimizer lamb`: the formula, and that runs hold it as they hold Adam."""

import pytest
import torch

from megatron.trainer.optimizer.lamb import Lamb
from tests.trainer.arguments.command_line import arguments
from tests.trainer.checkpoint.test_stages import check_cut, saved  # noqa: F401  a fixture
from tests.trainer.run.run_case import joined_weights, train
from tests.trainer.run.test_relay import FLUSH, FP16, L2L, ON_HOST, P1, P2, UNTIED, assert_same

FULL = pytest.mark.full
LAMB = f"{UNTIED} --optimizer lamb --adam-eps 1e-6"


def by_the_formula(weight, gradients, *, lr, betas, eps, decay):
    """You et al., 2019, algorithm 2, in FP64."""
    x = weight.double()
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for t, g in enumerate(gradients, start=1):
        m = betas[0] * m + (1 - betas[0]) * g.double()
        v = betas[1] * v + (1 - betas[1]) * g.double() ** 2
        r = m / (1 - betas[0] ** t) / ((v / (1 - betas[1] ** t)).sqrt() + eps) + decay * x
        ratio = x.norm() / r.norm() if x.norm() > 0 and r.norm() > 0 else 1.0
        x = x - lr * ratio * r
    return x


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("start", ["random", "zero"])
def test_steps_are_the_formulas(start, decay):
    """Also from weights of 0, whose first step has no ratio; each tensor by itself, with what its group says."""
    generator = torch.Generator().manual_seed(3)
    begins = [torch.randn(5, 7, generator=generator), torch.randn(11, generator=generator)]
    if start == "zero":
        begins[1].zero_()
    weights = [torch.nn.Parameter(each.clone()) for each in begins]
    groups = [{"params": weights[:1], "weight_decay": decay}, {"params": weights[1:], "lr": 0.05}]
    optimizer = Lamb(groups, lr=0.02, betas=(0.8, 0.95), eps=1e-6)
    gradients = [[torch.randn(each.shape, generator=generator) for _ in range(4)] for each in begins]
    for step in range(4):
        for weight, its in zip(weights, gradients, strict=True):
            weight.grad = its[step].clone()
        optimizer.step()
    numbers = {"betas": (0.8, 0.95), "eps": 1e-6}
    for weight, begin, its, lr, its_decay in zip(weights, begins, gradients, (0.02, 0.05), (decay, 0.0), strict=True):
        expected = by_the_formula(begin, its, lr=lr, decay=its_decay, **numbers)
        torch.testing.assert_close(weight.detach().double(), expected, rtol=2e-6, atol=1e-7)


# name: (flags of both, those of l2l)
BIT_EQUAL = {
    "FP32, eager": ("--clip-grad 0", ON_HOST),
}
BIT_EQUAL_MATRIX = {
    "bf16, clipped": ("--clip-grad 0.5 --bf16", ""),
    "fp16, overflows": (f"{FP16} --train-iters 10", ""),
    "two stages": ("--clip-grad 0.5", "--num-virtual-stages-per-pipeline-rank 2"),
}


@pytest.mark.parametrize(
    ("model", "relay"),
    [pytest.param(*row, id=name) for name, row in BIT_EQUAL.items()]
    + [pytest.param(*row, id=name, marks=FULL) for name, row in BIT_EQUAL_MATRIX.items()],
)
def test_the_relay_is_flush(model, relay):
    """On the host a stage's tensors are stepped as on the device, bit for bit; and not as Adam would step."""
    expected = train(1, f"{LAMB} {model} {FLUSH} {P1}")
    assert_same(expected, train(1, f"{LAMB} {model} {L2L} {relay} {P1}"))
    adam = joined_weights(train(1, f"{LAMB.replace('lamb', 'adam')} {model} {FLUSH} {P1}"))
    weights = joined_weights(expected)
    assert not all(torch.equal(weights[name], each) for name, each in adam.items())


@FULL
@pytest.mark.parametrize(
    ("model", "source", "target"),
    [
        ("--clip-grad 0", L2L, FLUSH),
        ("--clip-grad 0.5 --bf16", FLUSH, L2L),
        (FP16, f"{L2L} --async-save", L2L),
    ],
)
def test_checkpoints_go_both_ways(saved, model, source, target):  # noqa: F811
    """With the counters of steps, on which the bias corrections depend."""
    check_cut(saved, f"{LAMB} {model}", 1, f"{P1} {source}", 1, f"{P1} {target}", exact=True)


@FULL
def test_two_versions_of_weights():
    """2bw holds it, too: bit-equal on one rank and on two."""
    flags = f"{LAMB} --clip-grad 0 --pipeline-schedule 2bw"
    one, two = joined_weights(train(1, f"{flags} {P1}")), joined_weights(train(2, f"{flags} {P2}"))
    assert all(torch.equal(two[name], each) for name, each in one.items())


@FULL
def test_replicas_of_one_store_are_refused():
    """A share of a tensor has no norm of it."""
    with pytest.raises(AssertionError, match=r"share one store.*Lamb may not step each element by itself.*host name"):
        train(2, f"{LAMB} {L2L} {P1}")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--use-distributed-optimizer", "--use-distributed-optimizer does not go with --optimizer lamb, which steps"),
        ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 does not go with --optimizer lamb, which"),
        ("--pipeline-schedule 2bw --2bw-provisional stage", "it predicts weights element by element; leave it out, or"),
        ("--optimizer-kernel fused", "--optimizer-kernel fused does not go with --optimizer lamb"),
    ],
)
def test_where_no_rank_has_a_whole_weight_it_is_refused(flags, message):
    """With reason and remedy."""
    world_size = 2 if "tensor" in flags else 1
    with pytest.raises(ValueError) as error:
        arguments(f"--optimizer lamb {flags}", world_size=world_size)
    assert message in str(error.value)
