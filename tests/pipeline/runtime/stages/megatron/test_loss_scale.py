"""`LossScales`: which scale a batch uses, and how often an overflow lowers it."""

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from megatron.pipeline.runtime.update.loss_scales import LossScales


def dynamic_scaler(*, hysteresis: int = 1, interval: int = 1000) -> DynamicGradScaler:
    return DynamicGradScaler(
        initial_scale=1024.0,
        min_scale=1.0,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=interval,
        hysteresis=hysteresis,
    )


def used_scales(scales: LossScales, overflows: list[bool], *, drained_before: set[int], delay: int) -> list[float]:
    """Scale of every batch; its STEP comes `delay` batches later, or early where the run drains."""
    used, stepped = [], 0
    for batch in range(len(overflows)):
        until = batch if batch in drained_before else max(batch - delay + 1, 0)
        while stepped < until:
            scales.step(stepped, scale=used[stepped], overflow=overflows[stepped])
            stepped += 1
        used.append(scales.of_batch(batch))
    return used


def test_two_overflows_in_a_row_lower_the_scale_once():
    """Batches 2 and 3 overflow with one scale that both had chosen before either was stepped: halved once, from 4."""
    overflows = [False, False, True, True, False, False, False]
    used = used_scales(LossScales(dynamic_scaler(), delay=2), overflows, drained_before=set(), delay=2)
    assert used == [1024, 1024, 1024, 1024, 512, 512, 512]


def test_a_third_overflow_with_the_lowered_scale_lowers_it_again():
    """Only a batch that used the lowered scale can lower it further."""
    overflows = [True, True, True, False, False, False]
    used = used_scales(LossScales(dynamic_scaler(), delay=2), overflows, drained_before=set(), delay=2)
    assert used == [1024, 1024, 512, 512, 256, 256]


@pytest.mark.parametrize("drained_before", [{1}, {3}, {2, 4}, {1, 2, 3, 4, 5, 6}])
def test_a_drain_changes_no_scale(drained_before):
    """Steps that a drain executes early leave every batch's scale as it was."""
    overflows = [False, True, False, False, True, True, False, False]
    expected = used_scales(LossScales(dynamic_scaler(interval=2), delay=2), overflows, drained_before=set(), delay=2)
    scales = LossScales(dynamic_scaler(interval=2), delay=2)
    assert used_scales(scales, overflows, drained_before=drained_before, delay=2) == expected


def test_flush_uses_the_scale_after_the_previous_step():
    """With delay 1 the scales are those of an ordinary run: each overflow halves at once."""
    used = used_scales(LossScales(dynamic_scaler(), delay=1), [True, True, False, False], drained_before=set(), delay=1)
    assert used == [1024, 512, 256, 256]


def test_a_resumed_run_goes_on_with_the_same_scales():
    """State saved at any drained batch border, loaded beside the scaler's own, gives the uninterrupted scales."""
    overflows = [False, True, True, False, True, False, False, False]
    expected = used_scales(LossScales(dynamic_scaler(), delay=2), overflows, drained_before=set(), delay=2)
    for border in range(1, len(overflows)):
        scaler = dynamic_scaler()
        scales = LossScales(scaler, delay=2)
        for batch in range(border):
            scales.step(batch, scale=expected[batch], overflow=overflows[batch])
        resumed_scaler = dynamic_scaler()
        resumed_scaler.load_state_dict(scaler.state_dict())
        resumed = LossScales(resumed_scaler, delay=2)
        resumed.load_state_dict(scales.state_dict())
        used = list(expected[:border])
        for batch in range(border, len(overflows)):
            if batch - 2 >= border:
                resumed.step(batch - 2, scale=used[batch - 2], overflow=overflows[batch - 2])
            used.append(resumed.of_batch(batch))
        assert used == expected


def test_constant_scale_and_no_scaler():
    """A constant scale survives overflows; without a scaler the scale is 1."""
    constant = LossScales(ConstantGradScaler(128.0), delay=2)
    constant.step(0, scale=128.0, overflow=True)
    assert constant.of_batch(2) == 128.0
    assert LossScales(None, delay=2).of_batch(5) == 1.0
