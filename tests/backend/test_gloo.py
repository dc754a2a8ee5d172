"""Groups share a network device, and keep their timeouts."""

import time
from datetime import timedelta
from pathlib import Path

import pytest

from tests import workers


def num_network_threads() -> int:
    return [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")].count("gloo_tcp_loop")


def case_threads_of_groups(num_groups: int) -> tuple[int, list[float], float]:
    """(gloo's network threads that new groups add, the groups' timeouts in seconds, a sum over the last of them)"""
    import torch

    before = num_network_threads()
    groups = [torch.distributed.new_group(timeout=timedelta(seconds=10 + number)) for number in range(num_groups)]
    total = torch.ones(1)
    torch.distributed.all_reduce(total, group=groups[-1])
    options = [group._get_backend(torch.device("cpu")).options for group in groups]
    return num_network_threads() - before, [option._timeout.total_seconds() for option in options], total.item()


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux lists them")
def test_groups_add_no_threads_and_keep_their_timeouts():
    for added, timeouts, total in workers.run(2, "tests.backend.test_gloo:case_threads_of_groups", num_groups=5):
        assert added == 0
        assert timeouts == [10, 11, 12, 13, 14]
        assert total == 2


def case_wait_in_vain() -> str:
    """Wait for a peer that does not come, in a group with a timeout of a second, beside one with a long timeout."""
    import torch

    torch.distributed.new_group(timeout=timedelta(seconds=500))
    group = torch.distributed.new_group(timeout=timedelta(seconds=1))
    if torch.distributed.get_rank() == 1:
        return ""
    try:
        torch.distributed.recv(torch.ones(1), src=1, group=group)
    except RuntimeError as error:
        return str(error)
    return "received"


def test_a_groups_timeout_is_its_own():
    message, _ = workers.run(2, "tests.backend.test_gloo:case_wait_in_vain")
    assert "Timed out waiting 1000ms" in message


def case_connect_in_vain() -> tuple[float, float]:
    """Make a group with a peer that does not come, where it has to be there within a second: how long that takes, and
    the timeout of a group that is made so with a peer that comes; later, where it may be late to the meeting."""
    import torch

    from megatron.backend.gloo import connecting_within

    store, rank = torch.distributed.distributed_c10d._get_default_store(), torch.distributed.get_rank()
    with connecting_within(timedelta(seconds=1), meeting=timedelta(seconds=60)):
        time.sleep(2.0 * rank)
        torch.distributed.new_group()
    with connecting_within(timedelta(seconds=1)):
        met = torch.distributed.new_group(timeout=timedelta(seconds=500))
        start = time.monotonic()
        if rank == 0:
            with pytest.raises(RuntimeError):
                torch.distributed.ProcessGroupGloo(
                    torch.distributed.PrefixStore("alone", store), 0, 2, timedelta(seconds=500)
                )
    seconds = time.monotonic() - start
    torch.distributed.barrier(group=met)
    return seconds, met._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_a_group_can_be_given_less_time_to_connect_than_to_work():
    (seconds, timeout), _ = workers.run(2, "tests.backend.test_gloo:case_connect_in_vain")
    assert seconds < 60 and timeout == 500


def test_further_options_of_a_newer_torch_are_kept(monkeypatch):
    """torch 2.14 makes a group with a timeout and a keyword, which no constructor takes beside options."""
    from megatron.backend import gloo

    made = []
    monkeypatch.setattr(
        gloo, "_make_group", lambda self, store, rank, size, *args, **kwargs: made.append((args, kwargs))
    )
    gloo._on_shared_device(None, None, 0, 1, timeout=timedelta(seconds=7), _threads=5)
    [((options,), further)] = made
    assert (options._timeout, options._threads, further) == (timedelta(seconds=7), 5, {})


def own_port() -> int:
    """The port of the next groups, as gloo compares it: whose is smaller waits for the connection of the other."""
    import os
    import socket

    import psutil

    from megatron.backend import gloo

    def ports() -> set[int]:
        found = psutil.Process().net_connections("tcp4")
        return {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}

    before = ports()
    gloo._devices("groups", os.environ.get("GLOO_SOCKET_IFNAME", ""), os.getpid())
    [port] = ports() - before
    return socket.htons(port)


def case_connect_late() -> tuple[str, float]:
    """Rank 0 gives a group up before rank 1 connects to it, and both make other groups: how the first one went, and
    the seconds of the others."""
    import torch

    from megatron.backend import gloo
    from tests.backend.asked_store import AskedStore

    store, rank = torch.distributed.distributed_c10d._get_default_store(), torch.distributed.get_rank()
    ports = [0, 0]
    while ports[0] >= ports[1]:
        gloo.forget_devices()
        torch.distributed.all_gather_object(ports, own_port())
    before, gloo._LEAST = gloo._LEAST, timedelta(seconds=0.3)
    found, long = "", timedelta(seconds=20)
    try:
        with gloo.connecting_within(timedelta(seconds=1.5 if rank == 0 else 20)):
            given = torch.distributed.PrefixStore("late", store)
            given = given if rank == 0 else AskedStore(given, lambda: time.sleep(6.0))
            torch.distributed.ProcessGroupGloo(given, rank, 2, long)
    except RuntimeError as error:
        found = str(error)
    finally:
        gloo._LEAST = before
    gloo.forget_devices()
    start = time.monotonic()
    for number in range(8):
        group = torch.distributed.ProcessGroupGloo(torch.distributed.PrefixStore(str(number), store), rank, 2, long)
        for _ in range(20):
            group.allreduce([torch.ones(1)]).wait()
    return found, time.monotonic() - start


def test_a_peer_that_connects_late_disturbs_no_later_group():
    """It comes to the connection that gloo has freed, where the device is still the same."""
    (given_up, seconds), (refused, _) = workers.run(2, "tests.backend.test_gloo:case_connect_late")
    assert "Connect timeout" in given_up and refused
    assert seconds < 15
