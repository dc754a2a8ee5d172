"""Connections of this process are broken at both ends, and nothing else is touched."""

import os
import socket

from megatron.pipeline.runtime.failure.connections import break_connections, open_connections


def test_connections_are_broken_but_those_that_are_kept(tmp_path):
    """A peer reads the end of its stream; a kept connection, a door, local sockets, a pipe and a file stay."""
    with socket.create_server(("127.0.0.1", 0)) as door, open(tmp_path / "file", "w") as file:
        ends = [socket.create_connection(door.getsockname()) for _ in range(2)]
        peers = [door.accept()[0] for _ in ends]
        local, pipe = socket.socketpair(), os.pipe()
        assert {each.fileno() for each in (*ends, *peers)} <= open_connections()
        kept = open_connections() - {ends[0].fileno()}
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            break_connections(kept=kept)
        assert len(os.listdir("/proc/self/fd")) == before  # whatever they are, none was left open beside
        assert peers[0].recv(1) == b""
        ends[1].send(b"1")
        local[0].send(b"2")
        os.write(pipe[1], b"3")
        file.write("4")
        assert (peers[1].recv(1), local[1].recv(1), os.read(pipe[0], 1)) == (b"1", b"2", b"3")
        with socket.create_connection(door.getsockname()):
            door.accept()[0].close()
        for each in (*ends, *peers, *local):
            each.close()
        for number in pipe:
            os.close(number)
