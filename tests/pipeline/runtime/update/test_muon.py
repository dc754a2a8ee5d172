"""Muon against torch.optim.Muon, against its formulas in FP64, and shared by tensor ranks."""

import math

import pytest
import torch
import torch.distributed as dist

from megatron.pipeline.runtime.update.muon import (
    COEFFICIENTS,
    COLUMNS,
    QKV,
    ROWS,
    SCALES,
    WHOLE,
    Muon,
    Orthogonalization,
)
from megatron.pipeline.runtime.update.provisional_step import ProvisionalStep, is_scale_invariant
from tests import workers

SHAPES = ((6, 10), (10, 6), (8, 8))
QKV_ROWS = (4, 2, 2)  # two heads of queries, one of keys and one of values, each of two rows


def parameters(*shapes, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give_gradients(*sides, seed):
    """The same gradients to the parameters of both sides."""
    generator = torch.Generator().manual_seed(seed)
    for several in zip(*sides, strict=True):
        gradient = torch.randn(several[0].shape, generator=generator)
        for each in several:
            each.grad = gradient.clone()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    "scale, extra, adjusts", [("shape_scaling", 1.0, "original"), ("spectral", 0.2, "match_rms_adamw")]
)
def test_steps_are_torchs(nesterov, scale, extra, adjusts):
    """Matrices step as by torch.optim.Muon, the rest as by torch.optim.AdamW, bit for bit, each as its group says."""
    ours, theirs = parameters(*SHAPES, (4,), (3, 5)), parameters(*SHAPES, (4,), (3, 5))
    muon = Muon(
        [
            {"params": ours[:1], "muon": WHOLE, "lr": 0.03},
            {"params": ours[1:3], "muon": ROWS, "weight_decay": 0.0},
            {"params": ours[3:], "betas": (0.8, 0.9)},
        ],
        lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=nesterov,
        orthogonalization=Orthogonalization(coefficients="simple", scale=scale, extra_scale=extra),
    )  # fmt: skip
    of_torch = [
        torch.optim.Muon(
            [{"params": theirs[:1], "lr": 0.03}, {"params": theirs[1:3], "weight_decay": 0.0}],
            lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=nesterov, adjust_lr_fn=adjusts,
        ),
        torch.optim.AdamW(theirs[3:], lr=0.02, weight_decay=0.1, betas=(0.8, 0.9)),
    ]  # fmt: skip
    for step in range(4):
        give_gradients(ours, theirs, seed=step)
        muon.step()
        for each in of_torch:
            each.step()
        assert all(torch.equal(mine, its) for mine, its in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("num_steps", [1, 5, 10])
def test_the_iteration_is_the_formulas(coefficients, num_steps):
    """In FP32, of wide, tall and square matrices; one that runs out of coefficients begins anew or keeps the last."""
    values = COEFFICIENTS[coefficients]
    rest = [values[-1]] * 10 if coefficients == "polar_express" else [*values] * 10
    used = [*values, *rest][:num_steps]
    rule = Orthogonalization(coefficients=coefficients, num_steps=num_steps, in_bfloat16=False)
    for matrix in parameters(*SHAPES):
        x = matrix.detach().double() / matrix.detach().double().norm()
        for a, b, c in used:
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        found, _ = rule.direction(matrix.detach(), WHOLE)
        torch.testing.assert_close(found.double(), x, rtol=0, atol=2e-5)


def test_singular_values_become_about_one():
    """Also of a matrix of rank one whose entries are tiny; a matrix of zeros stays zero."""
    rule = Orthogonalization()
    for matrix in parameters((20, 30), (30, 20)):
        found, _ = rule.direction(matrix.detach(), WHOLE)
        values = torch.linalg.svdvals(found.float())
        assert values.min() > 0.6 and values.max() < 1.3
    column = torch.randn(5, 1) * 1e-4
    found, _ = rule.direction(column @ column.T, WHOLE)
    assert 0.6 < torch.linalg.svdvals(found.float()).max() < 1.3
    assert not rule.direction(torch.zeros(3, 4), WHOLE)[0].any()


@pytest.mark.parametrize(
    "scale, factors",
    [
        ("spectral", (math.sqrt(10), math.sqrt(10), math.sqrt(8))),
        ("unit_rms_norm", (math.sqrt(0.6), math.sqrt(10 / 6), 1.0)),
        ("shape_scaling", (1.0, math.sqrt(10 / 6), 1.0)),
    ],
)
def test_scales(scale, factors):
    """The factor of a step, by the shape of the matrix."""
    rule = Orthogonalization(scale=scale, extra_scale=0.5)
    found = [rule.direction(matrix.detach(), WHOLE)[1] for matrix in parameters(*SHAPES)]
    assert found == pytest.approx([0.5 * factor for factor in factors])
    assert scale in SCALES


def test_queries_keys_and_values_are_three_matrices():
    """Each over all its heads, with the scale of its shape; without rows they are one matrix."""
    (whole,) = parameters((16, 6))  # two groups of queries
    update = whole.detach()
    split = Orthogonalization(in_bfloat16=False, qkv_rows=QKV_ROWS)
    found, factor = split.direction(update, QKV)
    assert factor == 1.0
    rows = {"queries": [0, 1, 2, 3, 8, 9, 10, 11], "keys": [4, 5, 12, 13], "values": [6, 7, 14, 15]}
    for own in rows.values():
        expected, scale = split.direction(update[own], WHOLE)
        assert torch.equal(found[own], expected * scale)
    together, _ = Orthogonalization(in_bfloat16=False).direction(update, QKV)
    assert torch.equal(together, split.direction(update, WHOLE)[0])


def share_of(layout, split):
    """One of two tensor ranks: its part's direction, the whole's, and the step of its part."""
    shape = (16, 6) if layout == QKV else (6, 10)
    (matrix,) = parameters(shape)
    dimension, rank = (1 if layout == COLUMNS else 0), dist.get_rank()
    settings = {"qkv_rows": QKV_ROWS if split else None}
    part = matrix.detach().chunk(2, dim=dimension)[rank]
    found, factor = Orthogonalization(**settings, group=dist.group.WORLD).direction(part, layout)
    expected, whole_factor = Orthogonalization(**settings).direction(matrix.detach(), layout)
    block, block_factor = Orthogonalization(**settings).direction(part, layout)
    return {
        "same bits": torch.equal(found, expected.chunk(2, dim=dimension)[rank]) and factor == whole_factor,
        "as a block": torch.equal(found, block) and factor == block_factor,
    }


@pytest.mark.parametrize("layout, split", [(ROWS, False), (COLUMNS, False), (QKV, True), (QKV, False)])
def test_tensor_ranks_gather_a_matrix(layout, split):
    """Two ranks find the bits of one process for their parts, and not those of their parts by themselves."""
    for found in workers.run(2, f"{__name__}:share_of", layout=layout, split=split):
        assert found == {"same bits": True, "as a block": False}


def test_a_whole_matrix_is_not_gathered():
    """A router, say, which each tensor rank has: no collective, so a group that answers nobody does no harm."""
    (matrix,) = parameters((4, 6))
    alone = Orthogonalization().direction(matrix.detach(), WHOLE)
    beside = Orthogonalization(group=object()).direction(matrix.detach(), WHOLE)
    assert torch.equal(alone[0], beside[0])


def test_hooks_run_once_and_a_closure_gives_the_loss():
    """As of any torch optimizer, though AdamW's own step, which torch has wrapped by then, runs within."""
    torch.optim.AdamW(parameters((2,)))
    (matrix, bias) = parameters((3, 4), (3,))
    muon = Muon([{"params": [matrix], "muon": WHOLE}, {"params": [bias]}])
    calls = []
    muon.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        muon.zero_grad()
        loss = matrix.square().sum() + bias.square().sum()
        loss.backward()
        return loss

    before = matrix.detach().square().sum() + bias.detach().square().sum()
    assert torch.equal(muon.step(closure).detach(), before)
    assert calls == ["after"]


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_provisional_step_is_the_next_step(nesterov):
    """Bit for bit, in the first step and later; parameters, moments and counters stay as they were."""
    own = parameters(*SHAPES, (5,))
    muon = Muon([{"params": own[:3], "muon": WHOLE}, {"params": own[3:]}], lr=0.02, nesterov=nesterov)
    assert is_scale_invariant(muon)
    for step in range(3):
        give_gradients(own, seed=step)
        gradients = {each: each.grad / 2 for each in own}
        targets = {each: torch.empty_like(each) for each in own}
        before = [each.detach().clone() for each in own]
        ProvisionalStep(muon).take(lambda each, g=gradients: (g[each], 2.0), lambda each, t=targets: t[each])
        assert all(torch.equal(each, value) for each, value in zip(own, before, strict=True))
        muon.step()
        assert all(torch.equal(each, targets[each]) for each in own)
        assert {int(muon.state[each]["step"]) for each in own} == {step + 1}
