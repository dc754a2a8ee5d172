"""Inputs leave for the host and come back: who holds them, and when a buffer is another's."""

import weakref

import pytest
import torch

from megatron.pipeline.program.instruction import Instruction
from megatron.pipeline.runtime.activations.transfers import SavedMicrobatches
from megatron.pipeline.runtime.contract.stage import Microbatch
from megatron.pipeline.runtime.relay.input_stash import InputStash, RelayLedger


class Inputs:
    """Stage 1, of which only the inputs are there."""

    index = 1

    def __init__(self):
        self.inputs = {}

    def release_input(self, microbatch):
        return self.inputs.pop(microbatch.index)

    def restore_input(self, microbatch, input):
        self.inputs[microbatch.index] = input


class Rank:
    def __init__(self):
        self.saved = SavedMicrobatches([1])
        self.stash, self.stage = InputStash(self.saved), Inputs()

    def forward(self, index, size=3):
        self.saved.add(1)
        self.stage.inputs[index] = torch.full((size,), float(index))
        return self.microbatch(index)

    def there_and_back(self, index):
        self.stash.reload(self.stage, self.microbatch(index))()
        self.stash.note_awaited(Instruction.parse(f"1RELOAD{index}"))
        self.stash.restore(self.stage, self.microbatch(index))
        return self.stage.inputs[index].tolist()

    def microbatch(self, index):
        return Microbatch(index, 0, index, 4)


def test_an_input_is_held_until_its_copy_is_awaited_and_no_longer():
    """Both of two that leave are gone when the second's copy has been waited for, whoever still holds the copies."""
    rank = Rank()
    copies = [rank.stash.offload(rank.stage, rank.forward(index)) for index in range(2)]
    left = [weakref.ref(place[0]) for _, place in rank.stash._leaving]
    for copy in copies:
        copy()
    assert all(each() is not None for each in left), "nobody has waited"
    rank.stash.note_awaited(Instruction.parse("1OFFLOAD1"))
    assert all(each() is None for each in left)
    assert rank.saved._counts == {1: 0}


def test_what_comes_back_is_what_left():
    """The values, in memory of its own; a buffer is taken again when its input is back in use, and not before."""
    rank = Rank()
    for index in range(2):
        rank.stash.offload(rank.stage, rank.forward(index))()
    rank.stash.reload(rank.stage, rank.microbatch(0))()
    rank.stash.note_awaited(Instruction.parse("1RELOAD0"))
    rank.stash.offload(rank.stage, rank.forward(2))()
    assert rank.stash.num_buffers == 3, "the first input's is still read"
    rank.stash.restore(rank.stage, rank.microbatch(0))
    rank.stash.offload(rank.stage, rank.forward(3))()
    assert rank.stash.num_buffers == 3
    assert rank.stage.inputs[0].tolist() == [0.0] * 3
    for index in (1, 2, 3):
        rank.stash.reload(rank.stage, rank.microbatch(index))()
        with pytest.raises(AssertionError, match="are still away"):
            rank.stash.require_empty()
        rank.stash.note_awaited(Instruction.parse(f"1RELOAD{index}"))
        rank.stash.restore(rank.stage, rank.microbatch(index))
        assert rank.stage.inputs[index].tolist() == [float(index)] * 3
    rank.stash.require_empty()
    assert (rank.stash.num_offloaded, rank.stash.num_bytes_offloaded) == (4, 48)


def test_what_has_not_left_cannot_come_back():
    """A row that the checker refuses."""
    rank = Rank()
    with pytest.raises(AssertionError, match="microbatch 0 has never left stage 1"):
        rank.stash.reload(rank.stage, rank.forward(0))


def test_inputs_of_several_sizes_share_buffers():
    """There are as many buffers as inputs away at once, and none is larger than the largest input."""
    rank, ledger = Rank(), RelayLedger(always_on_device=0, on_host=lambda: 0)
    rank.stash = InputStash(rank.saved, ledger=ledger)
    for round, sizes in enumerate([(2, 5), (5, 2), (9, 3), (1, 9), (4, 4)]):
        indices = [2 * round, 2 * round + 1]
        for index, size in zip(indices, sizes, strict=True):
            rank.stash.offload(rank.stage, rank.forward(index, size))()
        for index, size in zip(indices, sizes, strict=True):
            assert rank.there_and_back(index) == [float(index)] * size
        assert rank.stash.num_buffers == 2
        assert ledger.host_bytes <= 2 * 4 * max(9 if round > 1 else 5, *sizes)
    assert ledger.host_bytes >= 4 * 9
