"""The questions about the device."""

import pytest

torch = pytest.importorskip("torch")

from megatron import backend


def test_backend_follows_the_machine(monkeypatch):
    """gloo without CUDA; nccl only where every rank has a GPU of its own; a choice that cannot work is refused."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backend.process_group_backend(None) == "gloo"
    assert backend.process_group_backend("gloo") == "gloo"
    with pytest.raises(ValueError, match="needs CUDA"):
        backend.process_group_backend("nccl")
    with pytest.raises(ValueError, match="mpi"):
        backend.process_group_backend("mpi")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert backend.process_group_backend(None) == "nccl"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert backend.process_group_backend(None) == "gloo"
    with pytest.raises(ValueError, match="2 ranks and 1 GPU:"):
        backend.process_group_backend("nccl")


def test_seed_and_state_repeat_the_numbers():
    """The device's random numbers come back with the seed and with the state."""
    device = backend.device()
    backend.manual_seed(5)
    state = backend.device_rng_state()
    first = torch.rand(3, device=device)
    backend.set_device_rng_state(state)
    assert torch.equal(first, torch.rand(3, device=device))
    backend.manual_seed(5)
    assert torch.equal(first, torch.rand(3, device=device))


def test_peak_memory_sees_an_allocation_and_forgets_it():
    """The peak rises by an allocation that is gone again, and a reset starts anew."""
    size = 256 * 1024 * 1024
    backend.reset_peak_memory()
    before = backend.peak_memory_bytes()
    tensor = torch.ones(size // 4, device=backend.device())
    backend.synchronize()
    del tensor
    assert backend.peak_memory_bytes() - before > 0.9 * size
    backend.reset_peak_memory()
    assert backend.peak_memory_bytes() - before < 0.5 * size
