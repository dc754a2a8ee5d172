"""WeightVersions: the version-to-slot table, and what switching weights under a graph in flight does."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.pipeline.runtime.update.versions import WeightVersions
from megatron.pipeline.runtime.update.weight_prediction import PredictedVersions


def linear(weight, x):
    return nn.functional.linear(x, weight)


def matmul(weight, x):
    return x @ weight


def tied(weight, x):
    """Used twice, as an embedding and as the output layer."""
    return nn.functional.embedding(torch.tensor([0, 2, 1]), weight).tanh() @ weight.t() + x.sum()


def recomputed(weight, x):
    """The weight is read again during the backward."""
    return checkpoint(lambda value: nn.functional.linear(torch.tanh(value @ weight), weight), x, use_reentrant=False)


@pytest.mark.parametrize("function", [linear, matmul, tied, recomputed])
def test_backward_sees_the_weights_of_its_forward(function):
    """Load a version, run F, make and load the next, switch back, run B: gradients equal those without any switch."""
    weight = nn.Parameter(torch.randn(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    expected = torch.autograd.grad(function(weight, x).square().sum(), (weight, x))
    versions = WeightVersions({"weight": weight}, window=2)
    optimizer = torch.optim.AdamW([weight], lr=0.1)

    versions.load(0)
    loss = function(weight, x).square().sum()
    weight.grad = torch.ones_like(weight)
    with versions.making(1):
        optimizer.step()
    weight.grad = None
    versions.load(1)
    function(weight, x).sum().detach()
    versions.load(0)
    loss.backward()

    assert torch.equal(weight.grad, expected[0])
    assert torch.equal(x.grad, expected[1])


def test_a_live_version_is_never_written():
    """With a window of 2 the slots alternate only as far as versions retire; both live versions keep their values."""
    weight = nn.Parameter(torch.zeros(3))
    versions = WeightVersions({"weight": weight}, window=2)
    for version in range(1, 6):
        before = versions.tensors(version - 1)["weight"].clone()
        with versions.making(version):
            weight.add_(1.0)
        assert versions.live() == [version - 1, version]
        assert torch.equal(versions.tensors(version - 1)["weight"], before)
        assert torch.equal(versions.tensors(version)["weight"], before + 1)
    assert versions.num_slots == 2 and versions.peak_live == 2


def test_one_version_is_written_in_place():
    """With flushes there is one slot, and the parameter keeps its storage."""
    weight = nn.Parameter(torch.zeros(3))
    address = weight.data_ptr()
    versions = WeightVersions({"weight": weight}, window=1)
    with versions.making(1):
        weight.add_(1.0)
    assert weight.data_ptr() == address and versions.live() == [1] and versions.num_slots == 1
    with pytest.raises(ValueError, match="version 0 is not alive"):
        versions.load(0)


def test_a_skipped_step_makes_an_alias():
    """Aliases share a slot, need no memory, and the next version still finds a slot that nobody uses."""
    weight = nn.Parameter(torch.zeros(3))
    versions = WeightVersions({"weight": weight}, window=2)
    versions.alias(1, of=0)
    assert versions.live() == [0, 1] and versions.num_slots == 1
    assert versions.slot_of(0) == versions.slot_of(1)
    with versions.making(2):
        weight.add_(1.0)
    assert versions.live() == [1, 2]
    assert versions.tensors(1)["weight"].sum() == 0 and versions.tensors(2)["weight"].sum() == 3
    versions.alias(3, of=2)
    with versions.making(4):
        weight.add_(1.0)
    assert versions.live() == [3, 4] and versions.num_slots == 2


def test_versions_come_one_by_one():
    """A version cannot be skipped or made twice."""
    versions = WeightVersions({"weight": nn.Parameter(torch.zeros(3))}, window=2)
    with pytest.raises(ValueError, match="version 2 cannot be made"):
        versions.prepare(2)
    versions.prepare(1)
    with pytest.raises(ValueError, match="version 1 cannot be made"):
        versions.alias(1, of=0)


def test_restore_takes_what_tensors_gave():
    """Both versions survive a round trip, also where they were given as the slots themselves in another order."""
    weight = nn.Parameter(torch.zeros(3))
    versions = WeightVersions({"weight": weight}, window=2)
    with versions.making(1):
        weight.add_(1.0)
    versions.restore({7: versions.tensors(1), 8: versions.tensors(0)})
    assert versions.newest == 8 and versions.live() == [7, 8]
    assert torch.equal(versions.tensors(7)["weight"], torch.ones(3))
    assert torch.equal(versions.tensors(8)["weight"], torch.zeros(3))
    assert torch.equal(weight, torch.zeros(3))
    same = {"weight": torch.full((3,), 2.0)}
    versions.restore({3: same, 4: same})
    assert versions.slot_of(3) == versions.slot_of(4)


def test_restore_refuses_other_shapes_and_too_many():
    """What does not fit is named."""
    versions = WeightVersions({"weight": nn.Parameter(torch.zeros(3))}, window=1)
    with pytest.raises(ValueError, match="weight is of shape"):
        versions.restore({0: {"weight": torch.zeros(4)}})
    with pytest.raises(ValueError, match="weight is missing"):
        versions.restore({0: {}})
    with pytest.raises(ValueError, match="1 to 1 versions fit"):
        versions.restore({0: {"weight": torch.zeros(3)}, 1: {"weight": torch.zeros(3)}})


def test_slots_may_be_views_of_one_buffer():
    """`make_slot` and `on_switch` let an owner of flat buffers follow."""
    buffers = [torch.zeros(6), torch.zeros(6)]
    first, second = nn.Parameter(buffers[0][:2]), nn.Parameter(buffers[0][2:])
    shown = []
    versions = WeightVersions(
        {"first": first, "second": second},
        window=2,
        make_slot=lambda: {"first": buffers[1][:2], "second": buffers[1][2:]},
        on_switch=shown.append,
    )
    with versions.making(1, copy=False):
        buffers[1].fill_(4.0)
    assert shown == [1] and first.sum() == 8 and second.sum() == 16
    versions.load(0)
    assert shown == [1, 0] and first.sum() == 0


def test_a_prediction_that_fails_is_forgotten():
    """Where error feedback goes back, a whole prediction is kept to be made again, and a part of one is not."""
    weight = nn.Parameter(torch.zeros(2))
    versions = PredictedVersions({"weight": weight})
    versions.upcoming = lambda: None
    for fails in (True, False):
        with contextlib.suppress(RuntimeError), versions.predicting(1) as target:
            target["weight"][: 1 if fails else 2] = 1.0
            if fails:
                raise RuntimeError("a replica is lost")
        assert versions.live() == ([0] if fails else [0, 1])
        versions.go_back_to(0)
        assert versions.restored is None if fails else versions.restored["weight"].tolist() == [1.0, 1.0]
    versions.load(0)
    assert weight.tolist() == [0.0, 0.0]


def test_what_a_move_takes_is_kept():
    """The true weights are shown, and the upcoming prediction is known, which equals them if no update is known."""
    weight = nn.Parameter(torch.zeros(2))
    versions = PredictedVersions({"weight": weight})
    versions.upcoming = lambda: None
    with versions.predicting(1) as target:
        target["weight"].fill_(1.0)
    versions.show_newest()
    assert not versions.is_kept_for_move
    versions.keep_for_move()
    assert versions.is_kept_for_move and weight.tolist() == versions.restored["weight"].tolist() == [0.0, 0.0]
    versions.load(1)
    assert not versions.is_kept_for_move and weight.tolist() == [1.0, 1.0]
