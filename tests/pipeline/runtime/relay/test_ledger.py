"""The account of what a relay holds: peaks since the last report, storages counted once and until they are gone."""

import torch

from megatron.pipeline.runtime.relay.input_stash import RelayLedger


def test_a_peak_is_that_since_the_last_report():
    """What was there before and is gone does not count again; what is there still does."""
    ledger = RelayLedger(always_on_device=100, on_host=lambda: 7)
    first, second = torch.zeros(4), torch.zeros(8)
    ledger.note_on_device(first)
    ledger.note_on_device(second)
    del second
    assert ledger.device_bytes == 116 and ledger.take_device_peak() == 148
    assert ledger.take_device_peak() == 116
    del first
    assert ledger.take_device_peak() == 116 and ledger.take_device_peak() == 100


def test_a_storage_counts_once():
    """However many views of it are told, and as long as one is there."""
    ledger = RelayLedger(always_on_device=0, on_host=lambda: 0)
    tensor = torch.zeros(2, 4)
    view = tensor[1]
    for each in (tensor, view, tensor, None):
        ledger.note_on_device(each)
    del tensor, each
    assert ledger.device_bytes == 32
    del view
    assert ledger.device_bytes == 0


def test_the_host_keeps_its_buffers():
    """Beside what the store says it has by then."""
    store = [10]
    ledger = RelayLedger(always_on_device=0, on_host=lambda: store[0])
    ledger.note_on_host(torch.zeros(3))
    store[0] = 20
    assert ledger.host_bytes == ledger.rank_metrics["host_peak_bytes"]() == 32
