"""The part `precision` as far as a CPU goes: megatron.core's layers, and a stand-in of Transformer Engine's."""

import pytest
import torch

from benchmarks.gpu_hour.precision import cast
from tests import workers

CASES = "tests.benchmarks.gpu_hour.part_cases"


@pytest.fixture(scope="module")
def found() -> dict:
    [found] = workers.run(1, f"{CASES}:rehearse", part="precision")
    return found


def test_precisions_begin_alike_and_differ_a_little(found):
    """From the same weights: losses differ, by less than BF16 rounds; each precision trains."""
    [start] = workers.run(1, f"{CASES}:start_of_precisions")
    assert start == {"bf16": 0.0, "fp32": 0.0, "tf32": 0.0}
    losses = {name: found["figures"][f"large_losses_in_{name}"] for name in ("bf16", "fp32", "tf32")}
    assert losses["fp32"] != losses["bf16"] == pytest.approx(losses["fp32"], abs=0.02)
    assert all(len(each) == 6 and each[-1] < each[0] for each in losses.values())
    assert min(found["figures"]["large_bf16_seconds_per_batch"]) > 0
    assert len(found["figures"]["large_ratio_of_fp32_over_bf16"]) == 2


def test_products_in_fp8_are_those_of_bf16_rounded(found):
    """Off by what e4m3 rounds, and not by a scale; where torch has no such product on this CPU, that is said."""
    said = [line for line in found["lines"] if line.startswith("torch has no FP8 product here")]
    errors = found["figures"].get("large_products_relative_error_of_fp8")
    assert bool(said) != bool(errors)
    if errors:
        assert len(errors) == 4 and all(0.01 < each < 0.06 for each in errors)
    assert "Transformer Engine is not installed, so FP8 was measured in products alone" in found["lines"]


def test_a_cast_fills_the_range_and_keeps_the_scale():
    tensor = 1e-3 * torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    narrow, back = cast(tensor)
    assert narrow.float().abs().max() == torch.finfo(torch.float8_e4m3fn).max
    assert ((narrow.float() * back - tensor).norm() / tensor.norm()).item() < 0.04


@pytest.mark.full
def test_with_transformer_engine_its_layers_train_in_fp8():
    """Two losses are near each other and not the same."""
    [found] = workers.run(1, f"{CASES}:rehearse", part="precision", device="engine")
    bf16, fp8 = (found["figures"][f"large_losses_in_te_{name}"] for name in ("bf16", "fp8"))
    assert bf16 != fp8 == pytest.approx(bf16, abs=0.05)
    assert not any("not installed" in line for line in found["lines"])
