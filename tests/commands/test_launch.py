"""The launcher: who dies takes the job along or not, as the job wants it; nothing of it is left."""

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron.commands import launch
from tests import workers
from tests.network_hosts import make_hosts

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("launched_job.py")
PATIENCE = 60.0


def launcher(output: str, arguments: list[str]) -> None:
    """The command in a forked process, which need not import torch."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs tests in the background ignores it
    launch._GRACE = 1.0
    sys.exit(launch.main(arguments))


class Launched:
    """A launcher at work."""

    def __init__(self, folder: Path, *arguments: object, name: str = "output") -> None:
        self.path = folder / f"{name}.txt"
        self.path.touch()
        self.process = workers.fork(launcher, str(self.path), [str(each) for each in arguments])

    def status(self) -> int | None:
        self.process.join(PATIENCE)
        try:
            return self.process.exitcode
        finally:
            self.process.kill()

    def output(self) -> str:
        return self.path.read_text()

    def lines(self, count: int) -> list[str]:
        """The first lines of the output, once there are so many."""
        deadline = time.monotonic() + PATIENCE
        while self.output().count("\n") < count and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.output().splitlines()[:count]


def run(folder, *arguments):
    job = Launched(folder, *arguments)
    return job.status(), job.output()


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def gone(pids) -> bool:
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_alive, pids))


def test_each_process_finds_its_place(tmp_path):
    """Its arguments are its own, those that begin with @ and those that the launcher has, too."""
    status, output = run(tmp_path, "--nproc-per-node", 2, JOB, "environment", "@flags.txt", "--nnodes", "7", "-m")
    assert status == 0
    assert sorted(output.splitlines()) == [f"{rank} {rank} 2 2 0 True @flags.txt --nnodes 7 -m" for rank in (0, 1)]


def test_two_nodes(tmp_path):
    """Ranks go on from node to node, and a failure on one ends both with its sentence and status."""
    for mode, status in (("environment", 0), ("fail", 7)):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        nodes = [
            Launched(
                tmp_path, "--nnodes", 2, "--node-rank", node, "--master-port", port, "--nproc-per-node", 1, JOB, mode,
                name=f"{mode}{node}",
            )
            for node in range(2)
        ]  # fmt: skip
        assert [node.status() for node in nodes] == [status, status]
        said = [node.output() for node in nodes]
        if mode == "environment":
            assert said == ["0 0 2 1 0 True\n", "1 0 2 1 1 True\n"]
        else:
            pattern = r"launch: rank 1 \(local rank 0, process \d+\) ended with status 7: the disk is full; the job is"
            assert all(re.match(pattern, each) for each in said) and said[0] == said[1]


@pytest.mark.parametrize(
    ("mode", "status", "how"),
    [("fail", 7, "ended with status 7: the disk is full"), ("kill", 137, "was killed by SIGKILL")],
)
def test_a_death_ends_a_job_that_does_not_accept_losses(tmp_path, mode, status, how):
    """Also where restarts are allowed: a job as a whole is not started again."""
    start = time.monotonic()
    ended, output = run(tmp_path, "--nproc-per-node", 3, "--max-restarts", 2, JOB, mode)
    assert time.monotonic() - start < 30 and ended == status
    assert re.fullmatch(rf"launch: rank 1 \(local rank 1, process \d+\) {how}; the job is ended\n", output), output


def test_survivors_go_on_and_new_processes_take_the_places_of_the_lost(tmp_path):
    """One is killed, one stops and is ended when the others have taken it for lost; all end in one epoch."""
    status, output = run(tmp_path, "--nproc-per-node", 4, "--max-restarts", 1, JOB, "survive", "--restarts")
    assert status == 0, output
    last = re.findall(r"^rank (\d): epoch (\d) with \(0, 1, 2, 3\), joined .*$", output, flags=re.MULTILINE)
    assert sorted(rank for rank, number in last if number != "0") == ["0", "1", "2", "3"], output
    assert re.search(r"rank 1 .* was killed by SIGKILL; the job goes on, and its place is taken by", output), output
    assert re.search(r"rank 2 .* was declared lost by the others \(no heartbeat for 8 s\) and is ended", output), output


@pytest.mark.full
def test_survivors_end_well_without_the_lost(tmp_path):
    status, output = run(tmp_path, "--nproc-per-node", 4, JOB, "survive")
    assert status == 0, output
    assert output.count("with (0, 3), joined ()") == 2 and "is taken by" not in output


@pytest.mark.full
def test_a_job_that_gives_up_is_ended(tmp_path):
    """It does not accept losses any more, so its own end is that of all, and nothing is started again."""
    status, output = run(tmp_path, "--nproc-per-node", 4, "--max-restarts", 3, JOB, "give-up")
    assert status == 5, output
    assert re.search(r"launch: rank 0 .* ended with status 5; the job is ended\n\Z", output), output


@pytest.mark.full
def test_a_host_that_is_cut_off_is_lost(tmp_path):
    """The ranks of the first host go on without those of the second, whose launcher ends them itself."""
    (tmp_path / "0.txt").touch()
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(make_hosts(2))
        nodes, options = (
            [],
            ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "host0", "--master-port", "29500"],
        )
        for node in range(2):
            command = [
                sys.executable,
                str(ROOT / "tools/launch.py"),
                *options,
                "--node-rank",
                str(node),
                str(JOB),
                "cut",
            ]
            output = stack.enter_context(open(tmp_path / f"{node}.txt", "w"))
            process = subprocess.Popen(
                hosts.command(node, command, directory=tmp_path), stdout=output, stderr=output,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
            stack.callback(process.wait)
            stack.callback(process.terminate)
            nodes.append(process)
        deadline = time.monotonic() + 2 * PATIENCE
        while (tmp_path / "0.txt").read_text().count("epoch 0") < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        hosts.set_link(1, up=False)
        assert [node.wait(2 * PATIENCE) for node in nodes] == [0, 1]
    said = [(tmp_path / f"{node}.txt").read_text() for node in range(2)]
    assert said[0].count("epoch 1 with (0, 1), joined ()") == 2, said[0]
    assert said[1].endswith(
        "launch: the launcher on host0, which hosts the job's store, is gone or cannot be reached; the job is ended\n"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing_behind(tmp_path, number):
    """Nor do deaf processes, and children in sessions of their own."""
    job = Launched(tmp_path, "--nproc-per-node", 2, JOB, "hang")
    pids = [int(pid) for line in job.lines(2) for pid in line.split()]
    assert len(pids) == 4 and all(map(is_alive, pids))
    os.kill(job.process.pid, number)
    assert job.status() == 128 + number
    assert gone(pids)


def test_ranks_go_with_a_launcher_that_is_killed(tmp_path):
    job = Launched(tmp_path, "--nproc-per-node", 2, JOB, "hang")
    ranks, children = zip(*(map(int, line.split()) for line in job.lines(2)), strict=True)
    job.process.kill()
    try:
        assert gone(ranks)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--nproc-per-node", 1, "--node-rank", 1, JOB], "--node-rank 1 is not below --nnodes 1; number nodes from 0"),
        (["--nproc-per-node", 1, "--nnodes", 2, JOB], "--nnodes above 1 needs --master-addr and --master-port"),
        (["--nproc-per-node", 1, "--master-port", 99999, JOB], "--master-port 99999 is no port; give one up to 65535"),
    ],
)
def test_what_cannot_be_started_is_refused(tmp_path, arguments, sentence):
    status, output = run(tmp_path, *arguments)
    assert status == 1 and output.startswith(f"error: {sentence}")


def test_a_name_that_no_host_has_is_refused(tmp_path, monkeypatch, capsys):
    """At once on node 0; on others, where the name may get its address later, after some patience."""
    monkeypatch.setattr(launch, "_NAME_PATIENCE", 0.5)
    for node in (0, 1):
        arguments = f"--nnodes 2 --node-rank {node} --nproc-per-node 1 --master-addr no.host.invalid --master-port 4242"
        assert launch.main([*arguments.split(), "no.py"]) == 1
        said = capsys.readouterr().err
        assert "--master-addr no.host.invalid has no address (" in said
        assert ("asks again for 0.5 seconds" in said) == (node == 1)


def test_a_port_that_is_taken_is_named(tmp_path):
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        port = taken.getsockname()[1]
        status, output = run(tmp_path, "--nproc-per-node", 1, "--master-port", port, JOB, "environment")
    assert status == 1 and f"no store can be opened at 127.0.0.1:{port}; choose another --master-port" in output


class ForgetfulBoard:
    """A board whose store is silent at the first question; a test that asks too often is ended."""

    is_lost, silent_seconds = False, 0.0

    def __init__(self) -> None:
        self.notices: dict[str, str] = {}
        self.num_asked = 0

    def write(self, name: str, text: str) -> None:
        self.num_asked += 1
        assert self.num_asked < 20, "the launcher waits for what it has not written"
        if self.num_asked > 1:
            self.notices[name] = text

    def read(self, name: str) -> str | None:
        return self.notices.get(name)


def test_a_result_that_the_store_has_not_taken_is_written_again(tmp_path, monkeypatch):
    """Else the launchers of all nodes would wait for it, since this one gives signs of life."""
    monkeypatch.setattr(launch, "_BEAT", 0.01)
    node = launch._Node(argparse.Namespace(nnodes=1, node_rank=0), tmp_path, 0, ForgetfulBoard(), num_ended_well=1)
    node.result()
    assert node.board.notices["result/0"] == "1 0 "
