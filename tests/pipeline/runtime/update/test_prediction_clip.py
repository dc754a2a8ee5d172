"""A prediction clips as the step before did, and more where a stage's own gradients ask for more."""

import pytest
import torch

from megatron.pipeline.runtime.update.gradients import norm_squared
from megatron.pipeline.runtime.update.weight_prediction import prediction_factor

CPU = torch.device("cpu")


def factor(gradients, part=1.0, *, last=1.0, largest=1.0, **others):
    squares = norm_squared([gradients], device=CPU)
    result = prediction_factor(part, squares, last=last, largest=largest, **others)
    assert result.dtype is torch.float32 and result.shape == ()
    return result.item()


@pytest.mark.parametrize(
    ("norm", "last", "expected"),
    [
        (0.5, 1.0, 1.0),  # nothing to clip
        (0.5, 0.25, 0.25),  # the rest of the model asked for it
        (4.0, 1.0, 0.25),  # the norm has jumped
        (4.0, 0.1, 0.1),
        (0.0, 0.5, 0.5),
    ],
)
@pytest.mark.parametrize("loss_scale", [1.0, 2.0**16])
@pytest.mark.parametrize("part", [1.0, 0.25])
def test_the_smaller_of_two_factors(norm, last, expected, part, loss_scale):
    """Gradients of so large a norm at least, made an estimate of the batch's and clipped."""
    gradients = torch.tensor([0.6, 0.8]) * (norm * part**0.5 * loss_scale)
    found = factor(gradients, part, last=last, loss_scale=loss_scale)
    assert found == pytest.approx(expected / part / loss_scale, rel=1e-5)


def test_with_the_last_factor_it_is_exact():
    """So a stage that clips by itself and one that does not agree where its norm asks for nothing."""
    assert factor(torch.ones(3), 0.75, last=0.3, largest=100.0) == torch.tensor(0.3 / 0.75).item()


def test_the_step_to_come_clips_no_less():
    """The norm of a stage is at most that of the model, so its factor bounds that of the step from above."""
    generator = torch.Generator().manual_seed(1)
    stages = [torch.randn(50, generator=generator) * scale for scale in (0.1, 1.0, 3.0)]
    step = 1.0 / torch.cat(stages).norm().item()
    factors = [factor(each) for each in stages]
    assert all(step < each <= 1.0 for each in factors) and min(factors) < 0.1


def test_one_of_four_replicas_knows_a_quarter():
    gradients = torch.tensor([0.6, 0.8]) * 8
    assert factor(gradients) == pytest.approx(1 / 8, rel=1e-5)
    assert factor(gradients, num_unread=3) == pytest.approx(1 / 4, rel=1e-5)
    assert factor(gradients, 0.25, num_unread=3) == pytest.approx(4 / 8, rel=1e-5)


@pytest.mark.parametrize(("signal", "rounding"), [(0.0, 0.05), (3.0, 0.05)])
def test_a_part_of_a_batch_asks_for_no_more_than_the_whole(signal, rounding):
    """Microbatches with a common signal and noise of their own: of all noise as much as the whole batch, of signal
    less; the norm of the estimate itself would ask for twice as much."""
    generator = torch.Generator().manual_seed(1)
    microbatches = [signal + torch.randn(10_000, generator=generator) for _ in range(4)]
    sums = torch.stack(microbatches).cumsum(0)
    whole, part = factor(sums[3] / 4), 0.25 * factor(sums[0] / 4, 0.25)
    assert part >= whole * (1 - rounding)
    assert signal or part == pytest.approx(whole, rel=rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_of_all_elements(dtype):
    parts = [torch.full((3, 2), 2.0, dtype=dtype), torch.full((5,), 3.0, dtype=dtype)]
    result = norm_squared(iter(parts), device=CPU)
    assert result.dtype is torch.float64 and result.item() == pytest.approx(6 * 4 + 5 * 9, rel=1e-6)
    assert norm_squared([], device=CPU).item() == 0.0


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_one_element_makes_it_not_finite(value):
    parts = [torch.ones(4), torch.tensor([0.0, float(value)])]
    assert not norm_squared(parts, device=CPU).isfinite()
