"""The stand-in for CUDA itself: what is in order passes, what is not is found, whichever came first."""

import threading
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from megatron import backend

backend.install()

from megatron.backend.streams import Milestone
from tests.pipeline.runtime.cuda.recording import recording


@pytest.fixture
def recorder():
    with recording() as recorder:
        yield recorder


def ones(recorder, *shape):
    return recorder.mark_on_device(torch.ones(*shape))


def kinds(recorder):
    return [kind for kind, _ in recorder.findings]


def test_streams_without_a_wait_are_a_finding(recorder):
    """A read on one stream of what another writes needs the wait, in either order; reads alone need none."""
    tensor = ones(recorder, 4)
    ready = recorder.record()
    other = recorder.make()
    with recorder.on(other):
        recorder.wait(ready)
        tensor.sum()
    tensor.sum()
    assert not recorder.findings
    tensor.add_(1)
    assert kinds(recorder) == ["unordered"]
    assert "add_ on compute" in recorder.findings[0][1] and "sum" in recorder.findings[0][1]


def test_an_event_orders_what_came_before_it(recorder):
    """A stream that waits for an event comes after all that the event's stream had been given, and no more."""
    tensor, other = ones(recorder, 4), recorder.make()
    before = recorder.record()
    tensor.add_(1)
    after = recorder.record()
    with recorder.on(other):
        recorder.wait(after)
        tensor.mul_(2)
    assert not recorder.findings
    with recorder.on(recorder.make()):
        recorder.wait(before)
        tensor.mul_(2)
    assert "unordered" in kinds(recorder)


def test_waits_are_passed_on(recorder):
    """What a stream has waited for, those that wait for it have waited for."""
    tensor, middle, last = ones(recorder, 4), recorder.make(), recorder.make()
    first = recorder.record()
    with recorder.on(middle):
        recorder.wait(first)
        passed_on = recorder.record()
    with recorder.on(last):
        recorder.wait(passed_on)
        tensor.add_(1)
    assert not recorder.findings


def test_parts_of_one_storage_are_told_apart(recorder):
    """Two streams may write two halves of a buffer."""
    whole, other = ones(recorder, 8), recorder.make()
    made = recorder.record()
    with recorder.on(other):
        recorder.wait(made)
        whole[4:].add_(1)
    whole[:4].add_(1)
    assert not recorder.findings
    whole[3:5].add_(1)
    assert kinds(recorder) == ["unordered"]


def test_views_and_shapes_are_no_accesses(recorder):
    """Looking at a tensor's shape, or making a view of it, needs no wait."""
    tensor = ones(recorder, 4, 4)
    with recorder.on(recorder.make()):
        tensor.t()[1:].detach()
        torch.zeros_like(tensor)
    assert not recorder.findings


def test_memory_that_is_dropped_too_early(recorder):
    """The stream that owns memory has to come after the others, or the host has to know that they are done."""
    other = recorder.make()

    def use(*, follow):
        tensor = ones(recorder, 4)
        made = recorder.record()
        with recorder.on(other):
            recorder.wait(made)
            tensor.sum()
            used = recorder.record()
        follow(used)
        del tensor
        recorder.record()

    use(follow=recorder.wait)
    use(follow=recorder.finish)
    assert not recorder.findings
    use(follow=lambda used: None)
    assert kinds(recorder) == ["freed"]


def test_the_computing_thread_waits_for_no_kernel(recorder):
    """Reading a value of the device is a finding in training; so is sleeping until an event. Values of the host, and
    what the host knows to be done, cost nothing.
    """
    on_device, on_host = recorder.mark_on_device(torch.ones(1)), torch.ones(1)
    assert on_device.item() == 1.0
    with recorder.training():
        on_host.item()
        assert not recorder.findings
        (on_device * 2).item()
        (on_device + on_host).tolist()
        recorder.finish(recorder.record())
        assert kinds(recorder) == ["host sync"] * 2, "the host knew all that"
        on_device.add_(1)
        recorder.finish(recorder.record())
    assert kinds(recorder) == ["host sync"] * 3


@pytest.mark.parametrize(
    "operation",
    [
        lambda device, host, mask: torch.equal(device, device),
        lambda device, host, mask: device.nonzero(),
        lambda device, host, mask: device[mask],
        lambda device, host, mask: host.copy_(device),
        lambda device, host, mask: device.copy_(host),
        lambda device, host, mask: torch.tensor(3.0, device=torch.device("cpu")),
        lambda device, host, mask: device.cpu(),
    ],
)
def test_hidden_waits_are_found(recorder, operation):
    """Where torch itself waits for the device: a truth, a size that depends on values, a copy to or from the host."""
    device = ones(recorder, 4)
    host, mask = torch.zeros(4), device > 0
    with recorder.training():
        operation(device, host, mask)
    assert kinds(recorder) == ["host sync"]


def test_what_waits_for_nothing_is_let_through(recorder):
    """Filling a mask, a copy out of pinned memory, a number that is filled in on the device."""
    device = ones(recorder, 4)
    mask, pinned = device > 0, recorder.host_buffer((4,), torch.float32)
    with recorder.training():
        device[mask] = 0.0
        device.copy_(pinned, non_blocking=True)
        torch.full((), 3.0, device=torch.device("cpu"))
    assert not recorder.findings


def test_a_thread_says_which_device_it_works_on(recorder):
    """A thread that asks something of the device has entered before."""
    for enter, expected in ((recorder.enter_thread, []), (lambda: None, ["stranger"])):
        thread = threading.Thread(target=lambda enter=enter: (enter(), recorder.record()))
        thread.start()
        thread.join()
        assert kinds(recorder) == expected


def test_whether_something_is_done_is_answered_late(recorder):
    """An event may be asked for in vain; in the end it has happened, and the host knows what was before it."""
    tensor, other = ones(recorder, 4), recorder.make()
    with recorder.on(other):
        recorder.wait(recorder.record())
    answers, events = [], [recorder.record() for _ in range(40)]
    with recorder.training():
        for event in events:
            answers.append([recorder.is_done(event) for _ in range(10)])
    assert {each[0] for each in answers} == {each[-1] for each in answers} == {True, False}
    assert all(recorder.is_done(event) for event in events)
    with recorder.on(other):
        tensor.add_(1)
    assert not recorder.findings


def test_threads_know_of_each_other_through_conditions(recorder):
    """A milestone orders the streams of two threads; that a thread has merely come first does not."""
    tensor, milestone = ones(recorder, 4), Milestone(recorder)

    def write(reach):
        recorder.enter_thread()
        with recorder.on(recorder.make()):
            recorder.wait(made)
            tensor.add_(1)
            reach()

    made = recorder.record()
    thread = threading.Thread(target=write, args=(milestone.reach,))
    thread.start()
    assert milestone.wait(10)
    thread.join()
    tensor.sum()
    assert not recorder.findings
    made = recorder.record()
    thread = threading.Thread(target=write, args=(lambda: None,))
    thread.start()
    thread.join()
    tensor.sum()
    assert "unordered" in kinds(recorder)


def test_a_communicator_has_one_thread_at_a_time(recorder):
    """Two threads may use a communicator if the second knows of the first."""
    group = recorder.communicator(PrefixStore("one", HashStore()), 0, 1, max_ctas=1, timeout=timedelta(seconds=10))
    done = threading.Event()

    def use(then):
        group.allreduce([torch.ones(1)]).wait()
        then()

    for then, expected in ((done.set, []), (lambda: None, ["two threads"])):
        thread = threading.Thread(target=use, args=(then,))
        thread.start()
        if not expected:
            done.wait()
        thread.join()
        use(lambda: None)
        assert kinds(recorder) == expected
    group.shutdown()


def test_a_communicator_is_used_before_training(recorder):
    """What a communicator does first in training is told; what it has done before is not."""
    group = recorder.communicator(PrefixStore("two", HashStore()), 0, 1, max_ctas=1, timeout=timedelta(seconds=10))
    group.allreduce([torch.ones(1)]).wait()
    with recorder.training():
        group.allreduce([torch.ones(1)]).wait()
        assert not recorder.findings
        group._reduce_scatter_base(torch.ones(1), torch.ones(1), torch.distributed.ReduceScatterOptions()).wait()
    assert kinds(recorder) == ["late"]
    group.shutdown()


def test_communicators_work_behind_the_stream_that_calls(recorder):
    """What a group sends was made before; what it brings is there for who waits."""
    group = recorder.communicator(PrefixStore("three", HashStore()), 0, 1, max_ctas=1, timeout=timedelta(seconds=10))
    tensor = ones(recorder, 4)
    work = group.allreduce([tensor])
    with recorder.on(recorder.make()):
        work.wait()
        tensor.add_(1)
    assert not recorder.findings
    tensor.sum()
    assert kinds(recorder) == ["unordered"]
    group.shutdown()
