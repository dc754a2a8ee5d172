"""Packed weights: the codes and values of each form, element by element, and of bitsandbytes where it is installed."""

import pytest
import torch

from megatron.pipeline.runtime.relay import packed_weights
from megatron.pipeline.runtime.relay.packed_weights import BLOCK, PACKINGS


def packed(packing, weight):
    codes, scales = (torch.empty(each.shape, dtype=each.dtype) for each in packing.empty(weight).values())
    packing.pack(weight, codes, scales)
    return codes, scales


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def weight(request):
    torch.manual_seed(3)
    made = torch.randn(6, 4 * BLOCK) * torch.logspace(-3, 3, 6).unsqueeze(1)
    made[2, :BLOCK] = 0
    return made.to(request.param)


@pytest.mark.parametrize("bits", PACKINGS)
def test_each_element_becomes_its_nearest_level(weight, bits, monkeypatch):
    """By hand, whatever the parts in which it is done; blocks of zeros stay zeros."""
    monkeypatch.setattr(packed_weights, "_AT_ONCE", 5 * BLOCK)
    packing = PACKINGS[bits]
    codes, scales = packed(packing, weight)
    assert codes.numel() * 8 == bits * weight.numel()
    found = torch.empty_like(weight)
    packing.unpack(codes, scales, found)
    levels = packed_weights._nf4_levels(torch.device("cpu")) if bits == 4 else torch.arange(-127, 128) / 127
    blocks = weight.float().view(-1, BLOCK)
    scale = blocks.abs().amax(dim=1, keepdim=True)
    assert torch.equal(scales, scale.squeeze(1))
    expected = scale.unsqueeze(2) * levels
    distance = (blocks.unsqueeze(2) - expected).abs()
    off = (found.float().view(-1, BLOCK) - blocks).abs()
    assert (off <= distance.amin(dim=2) + 2.0**-8 * scale).all()
    assert not found[2, :BLOCK].any()


def test_nf4_is_that_of_bitsandbytes(weight):
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, scales = packed(PACKINGS[4], weight)
    theirs, state = functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    assert torch.equal(codes, theirs.flatten()) and torch.equal(scales, state.absmax)
    found = torch.empty_like(weight)
    PACKINGS[4].unpack(codes, scales, found)
    assert torch.equal(found, functional.dequantize_4bit(theirs, state))


def test_what_is_packed():
    """Matrices of whole blocks, also of several experts in one tensor."""
    takes = PACKINGS[4].takes
    assert takes(torch.empty(2, BLOCK)) and takes(torch.empty(3, 2, BLOCK // 2))
    assert not takes(torch.empty(BLOCK)) and not takes(torch.empty(3, 7)) and not takes(torch.empty(2, BLOCK).int())
