"""The face for streams: on a CPU nothing waits, on CUDA torch's streams do, and NCCL's groups are bounded."""

import threading
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from megatron.backend import streams
from megatron.backend.streams import CpuStreams, CudaStreams, Milestone, streams_of

CPU = torch.device("cpu")


def test_a_cpu_has_nothing_outstanding():
    """Streams and events are None, waits return at once, and no group of NCCL's can be had."""
    streams = streams_of(CPU)
    assert isinstance(streams, CpuStreams) and not streams.runs_ahead
    event = streams.record()
    with streams.on(streams.make()):
        streams.wait(event)
        streams.finish(event)
    assert event is None and streams.is_done(event)
    buffer = streams.host_buffer((2, 3), torch.bfloat16)
    assert (buffer.shape, buffer.dtype, buffer.count_nonzero()) == ((2, 3), torch.bfloat16, 0)
    assert buffer.fill_(2.0).sum() == 12 and streams.host_buffer((0, 3), torch.float32).shape == (0, 3)
    assert streams.pin_mapping(buffer) is buffer
    kept = streams.kept_host_buffer((2, 3), torch.bfloat16)
    assert (kept.shape, kept.dtype, kept.count_nonzero()) == ((2, 3), torch.bfloat16, 0)
    with pytest.raises(AssertionError, match="gloo"):
        streams.communicator(None, 0, 2, max_ctas=2, timeout=timedelta(seconds=1))


def test_cuda_pins_what_is_mapped():
    """For all contexts; where the system refuses, it is said what to do."""
    tensor = torch.zeros(2**18)
    with mock.patch.object(torch.cuda, "cudart") as cudart:
        register = cudart.return_value.cudaHostRegister
        register.return_value = 0
        streams = CudaStreams(torch.device("cuda", 0))
        assert streams.pin_mapping(tensor) is tensor
        register.assert_called_once_with(tensor.data_ptr(), 2**20, 1)
        register.return_value = 2
        with pytest.raises(ValueError, match=r"0\.000977 GiB of the host's memory.*cannot be pinned \(2\); raise the"):
            streams.pin_mapping(tensor)


def test_cuda_pins_what_is_kept_and_lets_it_go():
    """Exactly its bytes, while somebody has it or a view of it."""
    with mock.patch.object(torch.cuda, "cudart") as cudart:
        register, unregister = cudart.return_value.cudaHostRegister, cudart.return_value.cudaHostUnregister
        register.return_value = 0
        buffer = CudaStreams(torch.device("cuda", 0)).kept_host_buffer((3, 5), torch.float16)
        address = buffer.data_ptr()
        register.assert_called_once_with(address, 30, 1)
        assert (buffer.shape, buffer.dtype, buffer.count_nonzero()) == ((3, 5), torch.float16, 0)
        view = buffer[1]
        del buffer
        unregister.assert_not_called()
        del view
        unregister.assert_called_once_with(address)
        register.return_value = 2
        with pytest.raises(ValueError, match=r"cannot be pinned \(2\); raise the"):
            CudaStreams(torch.device("cuda", 0)).kept_host_buffer((3, 5), torch.float16)
        unregister.assert_called_once()


def test_cuda_events_are_recorded_on_the_current_stream():
    """The host that waits for an event sleeps; waiting for None is waiting for nothing."""
    current, event = mock.Mock(), mock.Mock()
    event.query.return_value = False
    with (
        mock.patch.object(torch.cuda, "current_stream", return_value=current),
        mock.patch.object(torch.cuda, "Event", return_value=event) as make,
    ):
        streams = CudaStreams(torch.device("cuda", 3))
        assert streams.record() is event
        make.assert_called_once_with(blocking=True)
        event.record.assert_called_once_with(current)
        streams.wait(event)
        current.wait_event.assert_called_once_with(event)
        assert not streams.is_done(event) and streams.is_done(None)
        streams.finish(event)
        event.synchronize.assert_called_once()
        streams.wait(None)
        streams.finish(None)
        assert current.wait_event.call_count == event.synchronize.call_count == 1


def test_a_thread_works_on_its_own_gpu():
    """A thread that sets no device would make a context on GPU 0."""
    with mock.patch.object(torch.cuda, "set_device") as set_device:
        CudaStreams(torch.device("cuda", 3)).enter_thread()
    set_device.assert_called_once_with(torch.device("cuda", 3))


def test_a_device_without_a_number_is_the_callers():
    """ "cuda" is the device that is current where the streams are asked for, in whichever thread they are used."""
    with mock.patch.object(torch.cuda, "current_device", return_value=2):
        streams = streams_of(torch.device("cuda"))
    assert streams.device == torch.device("cuda", 2)


def test_communicators_are_bounded_and_go_first():
    """A group of NCCL's has the blocks that it is given, a stream of high priority, and the timeout."""
    made = {}

    class ProcessGroupNCCL:
        class Options:
            def __init__(self, is_high_priority_stream=False):
                self.is_high_priority_stream = is_high_priority_stream
                self.config = SimpleNamespace()

        def __init__(self, store, rank, size, options):
            made.update(store=store, rank=rank, size=size, options=options)

    timeout = timedelta(seconds=7)
    with mock.patch.object(torch.distributed, "ProcessGroupNCCL", ProcessGroupNCCL, create=True):
        group = CudaStreams(torch.device("cuda", 0)).communicator("store", 1, 2, max_ctas=4, timeout=timeout)
    assert isinstance(group, ProcessGroupNCCL) and (made["store"], made["rank"], made["size"]) == ("store", 1, 2)
    options = made["options"]
    assert (options.config.max_ctas, options.is_high_priority_stream, options._timeout) == (4, True, timeout)


@pytest.mark.parametrize("name", ["shutdown", "_shutdown"])
def test_groups_are_ended_under_either_name(name):
    """torch has called it both; a group that knows neither is left to be forgotten."""
    group = SimpleNamespace(**{name: mock.Mock()})
    streams.shut_down(group)
    getattr(group, name).assert_called_once_with()
    streams.shut_down(SimpleNamespace())


def test_a_milestone_is_reached_once_for_all():
    """Who waits too early waits; who waits in vain is told so; the event is that of the thread that came there."""
    streams = mock.Mock()
    milestone = Milestone(streams)
    streams.record.side_effect = lambda: "event" if not milestone.is_reached else "too late"
    assert not milestone.wait(0.01) and not milestone.is_reached
    streams.wait.assert_not_called()
    thread = threading.Thread(target=milestone.reach)
    thread.start()
    assert milestone.wait(10) and milestone.is_reached
    thread.join()
    streams.wait.assert_called_once_with("event")


def test_memory_that_cannot_be_pinned_is_one_sentence(monkeypatch):
    """CUDA's error of the host's memory, with how much it was and what to do."""

    def refuse(*args, **options):
        raise RuntimeError("CUDA error: out of memory")

    streams = object.__new__(CudaStreams)
    monkeypatch.setattr(torch, "empty", refuse)
    told = r"^2 GiB of the host's memory cannot be pinned \(CUDA error: out of memory\); raise the limit"
    with pytest.raises(ValueError, match=told):
        streams.host_buffer((1 << 29,), torch.float32)
