"""docs/provisional.md: the limits of stability that its table gives, from the recurrences themselves."""

import random
from pathlib import Path

import pytest

DECAY = 0.9
TEXT = (Path(__file__).parents[2] / "docs" / "provisional.md").read_text()


def run(curvature: float, *, delay: bool, predicts: bool, known: float = 1.0, noise: float = 0.0, steps: int = 3000):
    """Weights of momentum on a quadratic, with learning rate 1; what a pipeline does, in its order.

    A batch is computed at `used`. Behind it the step of the batch before is made, then the prediction, from a part of
    its gradient whose noise is 1 / `known` times as large in the square.
    """
    rng = random.Random(0)
    weights = used = 1.0
    momentum, waiting, trace = 0.0, None, []

    def stepped(gradient: float) -> tuple[float, float]:
        moved = DECAY * momentum + (1 - DECAY) * gradient
        return weights - moved, moved

    for _ in range(steps):
        mean, error = curvature * used, noise * rng.gauss(0, 1)
        if waiting is not None:
            weights, momentum = stepped(waiting)
        waiting = mean + error
        part = mean + error + noise * (1 / known - 1) ** 0.5 * rng.gauss(0, 1)
        if not delay:
            weights, momentum = stepped(waiting)
            waiting, used = None, weights
        else:
            used = stepped(part)[0] if predicts else weights
        trace.append(weights)
        if abs(weights) > 1e9:
            break
    return trace


def is_stable(curvature: float, **options: bool) -> bool:
    return abs(run(curvature, **options)[-1]) < 1.0


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"delay": False, "predicts": False}, 38.0),
        ({"delay": True, "predicts": False}, 1.0),
        ({"delay": True, "predicts": True}, 38.0),
    ],
)
def test_limits_of_the_table(options, limit):
    """Stable a little below the limit, not a little above."""
    assert is_stable(0.97 * limit, **options) and not is_stable(1.03 * limit, **options)
    assert f"{limit:g} |" in TEXT


def test_with_the_whole_gradient_it_is_flush():
    """Batch for batch, one batch later: the true weights of a pipeline lag by the step that it has not made yet."""
    flush = run(20.0, delay=False, predicts=False, steps=60)
    provisional = run(20.0, delay=True, predicts=True, steps=61)
    assert provisional[1:] == pytest.approx(flush, rel=1e-9)


@pytest.mark.parametrize("known", [0.25, 0.75])
def test_a_part_adds_noise_and_no_instability(known):
    """The spread of the weights grows, and as little as the formula says: 1 + s^2 (1/f - 1)."""
    curvature = 8.0
    spread = {}
    for part in (1.0, known):
        trace = run(curvature, delay=True, predicts=True, known=part, noise=0.1, steps=200_000)[1000:]
        spread[part] = sum(value * value for value in trace) / len(trace)
    expected = 1 + ((1 - DECAY) * curvature) ** 2 * (1 / known - 1)
    assert spread[known] / spread[1.0] == pytest.approx(expected, rel=0.05)
    assert "1 + s²(1/f - 1)" in TEXT
