"""Running statistics are counted once a microbatch, by the stage that has them, as the whole model counts them."""

import random

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from megatron.capture.blocks import blocks_of
from megatron.capture.cut import StageData, cut
from megatron.capture.estimate import Roofline, estimate
from megatron.capture.export import capture
from megatron.capture.profile import profile
from megatron.capture.randomness import Draw
from megatron.capture.tensors import load_stage
from tests.capture.cuts import contiguous
from tests.capture.in_turn import train_in_turn
from tests.capture.models import equal, gradients


class Norms(nn.Module):
    """Two batch norms, of which one has no weights."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.second, self.plain = nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False, momentum=0.3)
        self.head = nn.Linear(4, 1)

    def forward(self, image):
        hidden = self.norm(self.first(image)).relu().mean((2, 3))
        return self.head(self.plain(self.second(hidden)).tanh()).square().mean()


def _images(samples):
    return {"image": torch.randn(samples, 3, 6, 6) + 1}


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recompute"])
def test_statistics_equal_the_models(recompute):
    """After five microbatches, with a profile and evaluations between them: gradients and all buffers are bit-equal."""
    torch.manual_seed(3)
    model, twin = Norms(), Norms()
    twin.load_state_dict(model.state_dict())
    ours = capture(model, _images(3))
    assert equal(model.state_dict(), twin.state_dict()), "the capture counts"
    stages = cut(ours, contiguous(ours, 3, random.Random(2)))
    names = [name for stage in stages.values() for name, _ in stage.named_buffers() if "last_sample" not in name]
    assert sorted(names) == sorted(name for name, _ in model.named_buffers()), "each has one owner"
    for sample in range(5):
        batch = _images(4)
        expected = gradients(twin(**batch), twin)
        model.zero_grad()
        train_in_turn(stages, StageData(batch, Draw(seed=1, sample=sample)), recompute=recompute)
        assert equal({name: each.grad for name, each in model.named_parameters()}, expected)
        if sample == 2:
            profile(ours, batch, repeats=1)
            for each in (twin, *stages.values()):
                each.eval()
            with torch.no_grad():
                theirs = twin(**batch)
                assert torch.equal(ours.run(batch, Draw(seed=1, sample=9, training=False))[0], theirs)
            for each in (twin, *stages.values()):
                each.train()
    assert equal(model.state_dict(), twin.state_dict())
    assert model.norm.num_batches_tracked == 5
    states = {name: value for stage in stages.values() for name, value in stage.state_dict().items()}
    assert equal(states, twin.state_dict()), "a checkpoint has them"


def test_a_folder_has_the_statistics(tmp_path):
    """They are read as buffers, and no exact value is kept that would later be written in their place."""
    model, other = Norms(), Norms()
    model(**_images(4))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    exact = {}
    for stage in cut(captured := capture(other, _images(3)), contiguous(captured, 2, random.Random(1))).values():
        load_stage(stage, tmp_path, exact=exact)
    assert equal(other.state_dict(), model.state_dict())
    assert set(exact) == {name for name, _ in model.named_parameters()}


def test_statistics_stay_in_fp32_beside_bf16():
    model, batch = Norms(), {"image": _images(3)["image"].bfloat16()}
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    loss, _ = capture(model, batch).run(batch, Draw(seed=1, sample=0))
    loss.backward()
    hidden = nn.functional.conv2d(batch["image"], model.first.weight, model.first.bias).float()
    assert model.norm.weight.grad.isfinite().all() and model.norm.running_mean.dtype is torch.float32
    torch.testing.assert_close(model.norm.running_mean, 0.1 * hidden.mean((0, 2, 3)), rtol=1e-5, atol=1e-6)


def test_an_estimate_counts_nothing():
    model = Norms()
    ours = capture(model, _images(3))
    assert estimate(ours, _images(4), Roofline(1, 1)) and model.norm.num_batches_tracked == 0


class Overwrites(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("largest", torch.ones(()))

    def forward(self, x):
        self.largest.copy_(x.amax())
        return (x / self.largest * self.scale).square().mean()


class ReadsBefore(Overwrites):
    def forward(self, x):
        return super().forward(x * self.largest)


def test_what_is_read_before_it_is_overwritten_is_refused():
    with pytest.raises(ValueError, match="ReadsBefore writes into largest"):
        capture(ReadsBefore(), {"x": torch.rand(2, 3)})


def test_what_a_forward_overwrites_is_no_state():
    """Its readers get the value, and no operator writes into the buffer."""
    model, batch = Overwrites(), {"x": torch.rand(4, 3)}
    ours = capture(model, {"x": torch.rand(2, 3)})
    model.largest.zero_()
    loss, _ = ours.run(batch)
    assert model.largest == 0 and torch.equal(loss, model(**batch)) and len(blocks_of(ours)) > 1


def test_a_batch_norm_that_is_called_twice_is_refused():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(self.layer(self.norm(x))).square().mean()

    with pytest.raises(ValueError, match=r"norm \(BatchNorm1d\) writes into norm.*use GroupNorm"):
        capture(Twice(), {"x": torch.randn(3, 4)})
