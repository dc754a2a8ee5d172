"""docs/error_feedback.md: the limits of stability that it gives, from the recurrences themselves."""

from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "error_feedback.md").read_text()


def is_stable(curvature: float, decay: float, *, again: float, delay: bool = True, steps: int = 4000) -> bool:
    """Whether momentum on a quadratic stays bounded, with learning rate 1.

    A batch is computed at `used`: the weights with their last update taken `again` times more. Behind it comes the step
    of the batch before; without `delay` its own.
    """
    weights = used = 1.0
    momentum, waiting = 0.0, None
    for _ in range(steps):
        gradient = curvature * used
        due, waiting = (waiting, gradient) if delay else (gradient, None)
        if due is not None:
            momentum = decay * momentum + (1 - decay) * due
            weights -= momentum
        used = weights - again * momentum
        if abs(weights) > 1e9:
            break
    return abs(weights) < 1.0


@pytest.mark.parametrize(
    ("decay", "options", "limit", "text"),
    [
        (0.9, {"again": 0.0, "delay": False}, 38.0, "| w(t), flush | 38 | 78 |"),
        (0.95, {"again": 0.0, "delay": False}, 78.0, "| w(t), flush | 38 | 78 |"),
        (0.9, {"again": 0.0}, 1.0, "| w(t-1), 2bw | 1 | 1 |"),
        (0.95, {"again": 0.0}, 1.0, "| w(t-1), 2bw | 1 | 1 |"),
        (0.9, {"again": 1.0}, 2.7, "error feedback | 2.7 | 4.0 |"),
        (0.95, {"again": 1.0}, 4.0, "error feedback | 2.7 | 4.0 |"),
        (0.0, {"again": 1.0}, 0.62, "0.62 instead of 1.0"),
        (0.9, {"again": 1.5}, 3.0, "stable up to 3.0 at b = 0.9"),
        (0.9, {"again": 2.0}, 2.9, "2 times up to 2.9"),
        (0.9, {"again": 1.0, "delay": False}, 12.7, "from 38 to 12.7"),
    ],
)
def test_limits_of_the_page(decay, options, limit, text):
    """Stable a little below the limit, not a little above."""
    assert is_stable(0.97 * limit, decay, **options) and not is_stable(1.03 * limit, decay, **options)
    assert text in " ".join(TEXT.split())
