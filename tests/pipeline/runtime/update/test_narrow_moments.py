"""AdamW with moments in BF16, rounded to the nearest value or by dithering."""

import pytest
import torch

from megatron.pipeline.runtime.update.narrow_moments import PERIOD, NarrowMoments, dither

BF16, FP32 = torch.bfloat16, torch.float32
OPTIONS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def rounded(values, step):
    """What `dither` says, one element after another, in whole numbers."""
    found = []
    for index, value in enumerate(values.flatten().tolist()):
        bits = int(torch.tensor(value).view(torch.int32)) % 2**32
        added = (index % PERIOD * 27145 + step * 40503) % 2**16
        bits = (bits + added) // 2**16 * 2**16
        found.append(torch.tensor(bits - 2**32 * (bits >= 2**31), dtype=torch.int32).view(FP32))
    return torch.stack(found).view(values.shape)


@pytest.mark.parametrize("dithers", [False, True])
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP32, BF16)])
def test_moments_are_rounded_behind_each_step(dtypes, dithers):
    """Bit-equal to torch's AdamW whose moments a plain loop rounds; also from a state that was saved and loaded."""
    generator = torch.Generator().manual_seed(5)
    begin = torch.randn(5, 29, generator=generator)
    mine, plain = (torch.nn.Parameter(begin.clone()) for _ in range(2))
    optimizer = NarrowMoments([mine], dtypes=dtypes, dithers=dithers, **OPTIONS)
    expected = torch.optim.AdamW([plain], **OPTIONS)
    for step in range(1, 5):
        mine.grad = torch.randn(begin.shape, generator=generator)
        plain.grad = mine.grad.clone()
        optimizer.step()
        expected.step()
        for name, dtype in zip(("exp_avg", "exp_avg_sq"), dtypes, strict=True):
            values = expected.state[plain][name]
            values = (rounded(values, step) if dithers and dtype is BF16 else values).to(dtype)
            assert optimizer.state[mine][name].dtype is dtype and torch.equal(optimizer.state[mine][name], values)
            expected.state[plain][name] = values.float()
        assert torch.equal(mine, plain)
        if step == 2:
            state = optimizer.state_dict()
            optimizer = NarrowMoments([mine], dtypes=dtypes, dithers=dithers, **OPTIONS)
            optimizer.load_state_dict(state)


@pytest.mark.parametrize("fused", [False, True])
def test_shares_of_a_parameter_are_stepped_like_the_whole(fused):
    """Shares that begin at multiples of PERIOD have the bits of the parameter that is stepped whole."""
    generator = torch.Generator().manual_seed(5)
    whole = torch.nn.Parameter(torch.randn(3 * PERIOD + 5, generator=generator))
    parts = [torch.nn.Parameter(part.clone()) for part in whole.detach().split([2 * PERIOD, PERIOD + 5])]
    options = {"dtypes": (BF16, BF16), "dithers": True, "fused": fused, **OPTIONS}
    one, other = NarrowMoments([whole], **options), NarrowMoments(parts, **options)
    for _ in range(3):
        whole.grad = torch.randn(whole.shape, generator=generator)
        for part, gradient in zip(parts, whole.grad.split([2 * PERIOD, PERIOD + 5]), strict=True):
            part.grad = gradient.clone()
        one.step()
        other.step()
    assert torch.equal(whole, torch.cat([part.detach() for part in parts]))
    assert torch.equal(one.state[whole]["exp_avg_sq"], torch.cat([other.state[part]["exp_avg_sq"] for part in parts]))


def test_a_dithered_moment_shrinks_as_it_should():
    """A second moment without gradients decays by 0.999 a step, within 4% after 1,000, where rounding to the nearest
    keeps it."""
    begin = torch.linspace(1.0, 2.0, 200)
    dithered, nearest = begin.clone(), begin.to(BF16)
    for step in range(1, 1001):
        dithered.mul_(0.999)
        dither(dithered, step)
        nearest = (nearest.float() * 0.999).to(BF16)
    assert torch.equal(dithered.to(BF16).float(), dithered)
    assert torch.allclose(dithered, begin * 0.999**1000, rtol=0.04)
    assert torch.equal(nearest, begin.to(BF16))
