"""Copies between host and device and the host's optimizer, timed as the runtime does them."""

from dataclasses import replace

import pytest

from megatron import backend

backend.install()

from megatron.planner.memory.parameters import layer_parameters
from megatron.trainer.profile import measurements
from megatron.trainer.profile.measurements import shapes_of_layer, time_copies, time_updates
from tests.planner.profiles import MODEL


def test_copies_of_each_size_in_both_directions():
    """As often as is asked, without the warm-up; larger ones take longer."""
    found = time_copies((64, 2**24), num_iterations=3, num_warmup=1)
    assert set(found) == {(way, size) for way in ("to device", "from device") for size in (64, 2**24)}
    assert all(len(samples) == 3 and min(samples) > 0 for samples in found.values())
    for way in ("to device", "from device"):
        assert min(found[way, 2**24]) > min(found[way, 64])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_updates_are_the_runtimes_by_both_kernels(dtype, monkeypatch):
    """They step, with FP32 masters of 16-bit weights."""
    steps = []

    class Watched(measurements.HostOptimizer):
        def update(self, stage, settings, **others):
            weight = self._store.stages[0].weights["0"]
            before = weight.clone()
            super().update(stage, settings, **others)
            (group,) = self.optimizer.param_groups
            steps.append((group["fused"], bool((weight != before).all()), {each.dtype for each in group["params"]}))

    monkeypatch.setattr(measurements, "HostOptimizer", Watched)
    count, found = time_updates(MODEL, dtype, num_iterations=2, num_warmup=1)
    assert {kernel: len(samples) for kernel, samples in found.items()} == {"loop": 2, "fused": 2}
    assert [fused for fused, _, _ in steps] == [None] * 3 + [True] * 3
    assert all(dtypes == {measurements.torch.float32} for _, _, dtypes in steps)
    assert all(moved for _, moved, _ in steps[:1] + steps[3:4]) and count == pytest.approx(
        layer_parameters(MODEL, 1), rel=0.01
    )


def test_very_large_matrices_are_cut():
    """A layer of 200 million parameters is stood for by matrices of 4 million elements."""
    large = replace(MODEL, hidden_size=4096, ffn_hidden_size=16384, num_attention_heads=32, num_query_groups=32,
                    kv_channels=128)  # fmt: skip
    sizes = [rows[0] * rows[1] for rows in shapes_of_layer(large) if len(rows) == 2]
    assert len(sizes) == 4 and max(sizes) <= 2**22 and min(sizes) > 2**21
