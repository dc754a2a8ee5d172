"""The speed of a relay in a dry run: what unpacking packed weights costs."""

import json

import pytest
import torch

from megatron.capture.estimate import Roofline
from megatron.finetuning import relay_plan
from megatron.finetuning.arguments import changed, parse_args
from megatron.finetuning.plan import make_plan
from megatron.finetuning.samples import read_data
from megatron.pipeline.runtime.relay.packed_weights import PACKINGS
from megatron.planner.job.devices import described
from tests.finetuning import lora, tiny

ONLY_BYTES = Roofline(teraflops=1e30, gigabytes_per_second=1.0)
SLOW = described(memory_gib=1.0, peak_teraflops=1.0, memory_bandwidth=0.01, link_bandwidth=1e6)
"""Its memory is so slow that nothing else takes time."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    return folder, lora.llama_folder(folder)


ADAPTER = ("--lora_r", 2, "--target_modules", "q_proj")


def planned(llama, *flags, adapter=ADAPTER):
    folder, base = llama
    argv = ["--model_name_or_path", base, *adapter, "--dtype", "bfloat16"]
    argv += ["--pipeline_schedule", "l2l", "--gradient_accumulation_steps", 4, *flags]
    command = [*tiny.command(folder, "causal-lm", *argv), "--output_dir", str(folder)]
    args = changed(parse_args(command), resumed_from=None)
    return make_plan(args, read_data(args)), args


def from_layer(llama, first):
    """The flags of an adapter in the layers from `first` on."""
    config = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "layers_to_transform": list(range(first, 4))}
    (llama[0] / "adapter.json").write_text(json.dumps(config), encoding="utf-8")
    return ["--peft_config", llama[0] / "adapter.json"]


@pytest.mark.full
def test_a_rank_without_an_adapter_in_its_last_layer_is_refused(llama):
    with pytest.raises(ValueError, match=r"on 2 ranks the first 3 of 4 layers .* give each replica at most 1 device"):
        planned(llama, "--dry_run", "--devices", 2, adapter=from_layer(llama, 3))


@pytest.mark.full
def test_more_devices_than_layers_are_refused(llama):
    with pytest.raises(ValueError, match=r"has 4 numbered layers, and a relay on 5 needs 5 at least; give fewer dev"):
        planned(llama, "--dry_run", "--devices", 5)


UNPACKED = {
    4: (0.5 + 2) + (2 + 4 + 4) + (8 + 4 / 64) + (4 + 2) + 6,
    8: (1 + 4) + 8 + (8 + 4 / 64) + (4 + 2) + 6,
}
"""Bits -> bytes of an element: codes become 4 bytes each, then levels; these are scaled, rounded to BF16 and copied."""


@pytest.mark.parametrize("bits", UNPACKED)
def test_unpacking_takes_the_bytes_of_its_kernels(bits):
    count, of_no_weights = 2**22, {"weights": {}, "plain": 0, "packed": {}, "gradients": 0, "trained": 0}
    stage = relay_plan.StageBytes(**of_no_weights, unpacked={(count, torch.bfloat16): 2})
    [found] = relay_plan.unpack_seconds([stage], PACKINGS[bits], ONLY_BYTES)
    assert found == pytest.approx(2 * count * UNPACKED[bits] / 1e9, rel=1e-3)


@pytest.mark.parametrize(
    ("resident", "first"), [(1, 2), *(pytest.param(each, 0, marks=pytest.mark.full) for each in (1, 2))]
)
def test_the_device_unpacks_each_fetch(llama, monkeypatch, resident, first):
    """Once for the forwards and, unless the layer stayed or lies before the first adapter, once for the backwards; a
    batch is longer by as much.
    """
    flags = ["--load_in_4bit", "--l2l_resident_stages", resident]
    plan, args = planned(llama, *flags, adapter=from_layer(llama, first))
    found = relay_plan.speed_of(plan, args, SLOW)
    unpack = relay_plan.unpack_seconds(
        relay_plan.stage_bytes(plan, args), PACKINGS[4], Roofline(1e-3, 0.01, relay_plan.LAUNCH_MICROSECONDS)
    )
    assert min(unpack) > 0
    monkeypatch.setattr(relay_plan, "unpack_seconds", lambda of_stages, *_: [0.0] * len(of_stages))
    without = relay_plan.speed_of(plan, args, SLOW)
    again = sum(unpack[first:-resident])
    assert found.compute - without.compute == pytest.approx(sum(unpack) + again, rel=1e-6)
    assert found.simulated - without.simulated >= 0.999 * (sum(unpack) + again)
    assert found.link == without.link and found.host == without.host
    assert found.bound <= found.simulated


def test_plain_weights_are_not_unpacked(llama):
    plan, args = planned(llama)
    of_stages = relay_plan.stage_bytes(plan, args)
    assert relay_plan.unpack_seconds(of_stages, None, ONLY_BYTES) == [0.0] * plan.schedule.num_stages
