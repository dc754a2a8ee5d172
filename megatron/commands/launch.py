"""Start the processes of a job, and let the job go on without those that it can lose.

    python tools/launch.py --nproc-per-node 8 pretrain_gpt.py ...
    python tools/launch.py --nnodes 2 --node-rank N --master-addr host0 --master-port 29500 --nproc-per-node 8 \\
        pretrain_gpt.py ...                                       # the same on each node
    python tools/launch.py --nproc-per-node 8 --max-restarts 3 -m megatron.trainer.programs.pretrain_gpt ...

Each process finds its place in the environment, as under torchrun: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and so on.
torchrun ends all processes when one of them dies. This command does so, too, unless the job has told it that it accepts
losses. Then the others go on. A process that has died, or that the others have declared lost, is ended with all its
children. With --max-restarts it is started again in its place, and asks to be taken in.

The job's store is in the process of this command on node 0, so no rank is needed by the others; node 0 itself is.

The exit status is 0 if a process ended well after those that were lost; else that of the first process that failed, or
128 and the number of the signal that killed it. After SIGTERM, SIGINT or SIGHUP all processes are ended.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed import TCPStore

from megatron.documents import command_line, flag_types
from megatron.pipeline.runtime.failure.errors import KEEPS_SURVIVORS, read_error_file
from megatron.pipeline.runtime.failure.failure_board import ANSWER_PATIENCE, FailureBoard
from megatron.pipeline.runtime.failure.heartbeats import Watch
from megatron.pipeline.runtime.failure.membership import ACCEPTS_LOSSES, LAUNCHER, out_of
from megatron.processes import MARK, end_marked, end_with_parent, mark_of

_POLL = 0.1
_GRACE = 30.0  # seconds between SIGTERM, at which training saves, and SIGKILL
_BEAT = 1.0  # seconds between the launchers' signs of life, and between looks for processes that are declared lost
_LAST_PORT = 65535
_NAME_PATIENCE = 30.0  # seconds for which the name of node 0 may have no address yet
_NODE_TIMEOUT = 30.0  # seconds of silence after which a node's result is no longer awaited


@dataclass
class _Worker:
    """A process of the job on this node.

    Attributes:
        num_starts: how often the process was started.
        is_out: whether the others have taken it for lost.
    """

    rank: int
    local_rank: int
    error_file: Path
    process: subprocess.Popen
    mark: str
    num_starts: int = 1
    is_running: bool = True
    is_out: bool = False

    @property
    def name(self) -> str:
        return f"rank {self.rank} (local rank {self.local_rank}, process {self.process.pid})"

    def describe_end(self) -> str:
        """Describe in a few words how the process ended."""
        status = self.process.returncode
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        told = read_error_file(self.error_file)
        return f"{self.name} {how}" + (f": {told}" if told else "")

    def status(self) -> int:
        """The exit status of the process, as a shell reports it."""
        return self.process.returncode if self.process.returncode >= 0 else 128 - self.process.returncode


class _JobFailed(Exception):
    """The end of the whole job. Attribute `status`: the exit status of this command."""

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass
class _Node:
    """The processes of the job on this node."""

    options: argparse.Namespace
    folder: Path
    port: int
    board: FailureBoard
    workers: list[_Worker] = field(default_factory=list)
    failure: tuple[str, int] | None = None  # of the first worker that was lost
    num_ended_well: int = 0
    beats_at: float = 0.0
    num_beats: int = 0

    def __post_init__(self) -> None:
        self.run_id = uuid.uuid4().hex

    # -- processes ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for local_rank in range(self.options.nproc_per_node):
            rank = self.options.node_rank * self.options.nproc_per_node + local_rank
            error_file, mark = self.folder / f"error_{rank}.json", mark_of(self.folder / str(rank))
            process = self._process(rank, local_rank, 0, error_file, mark)
            self.workers.append(_Worker(rank, local_rank, error_file, process, mark))

    def _process(self, rank: int, local_rank: int, num_restarts: int, error_file: Path, mark: str) -> subprocess.Popen:
        options = self.options
        here, everywhere = str(options.nproc_per_node), str(options.nproc_per_node * options.nnodes)
        environment = {
            "OMP_NUM_THREADS": "1" if options.nproc_per_node > 1 else "",  # torchrun's default
            **os.environ,
            "RANK": str(rank), "LOCAL_RANK": str(local_rank), "GROUP_RANK": str(options.node_rank),
            "WORLD_SIZE": everywhere, "LOCAL_WORLD_SIZE": here, "GROUP_WORLD_SIZE": str(options.nnodes),
            "ROLE_NAME": "default", "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": everywhere,
            "MASTER_ADDR": options.master_addr, "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RUN_ID": self.run_id, "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(num_restarts),
            "TORCHELASTIC_MAX_RESTARTS": "0",  # of the job as a whole
            KEEPS_SURVIVORS: "1",
            "TORCHELASTIC_ERROR_FILE": str(error_file),
            MARK: mark,
        }  # fmt: skip
        environment = {name: value for name, value in environment.items() if name != "OMP_NUM_THREADS" or value}
        program = ["-m", options.script] if options.module else [options.script]
        return subprocess.Popen(
            [sys.executable, "-u", *program, *options.arguments],
            env=environment,
            start_new_session=True,  # Ctrl-C is for this command, which then ends them
            preexec_fn=lambda: end_with_parent(signal.SIGKILL),
        )

    def end_all(self) -> None:
        """End all processes of this node and their children, with SIGTERM and then with SIGKILL."""
        running = [worker.process for worker in self.workers if worker.process.poll() is None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + _GRACE
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for worker in self.workers:
            end_marked(worker.mark)
        for process in running:
            process.wait()

    # -- the watch ----------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Return when no process of this node runs any more. Raises _JobFailed if the job ends as a whole."""
        while any(worker.is_running for worker in self.workers):
            time.sleep(_POLL)
            for worker in self.workers:
                if worker.is_running and worker.process.poll() is not None:
                    self._ended(worker)
            if time.monotonic() >= self.beats_at:
                self._look_at_store()

    def _ended(self, worker: _Worker) -> None:
        worker.is_running = False
        if worker.process.returncode == 0:
            self.num_ended_well += 1
            return
        sentence, status = worker.describe_end(), worker.status()
        self.failure = self.failure or (sentence, status)
        accepts = self.board.read(ACCEPTS_LOSSES) == "yes"
        if not accepts and not worker.is_out:
            told = self.board.tell(f"{status} {sentence}")
            status, _, sentence = told.partition(" ")
            raise _JobFailed(sentence, int(status))
        end_marked(worker.mark)  # its children
        restarts = accepts and worker.num_starts <= self.options.max_restarts and self.num_ended_well == 0
        say(f"{sentence}; the job goes on" + (", and its place is taken by a new process" if restarts else ""))
        if restarts:
            worker.error_file.unlink(missing_ok=True)
            worker.process = self._process(
                worker.rank, worker.local_rank, worker.num_starts, worker.error_file, worker.mark
            )
            worker.num_starts += 1
            worker.is_running, worker.is_out = True, False

    def _look_at_store(self) -> None:
        self.beat()
        failure = self.board.story()
        if failure is not None:
            status, _, sentence = failure.partition(" ")
            raise _JobFailed(sentence, int(status))
        for worker in self.workers:
            key = out_of(self.run_id, worker.process.pid)
            reason = self.board.read(key) if worker.is_running else None
            if reason is not None:
                say(f"{worker.name} was declared lost by the others ({reason}) and is ended")
                worker.is_out = True
                worker.process.kill()

    def beat(self) -> None:
        """Tell the other nodes that this one is there. Raises _JobFailed if the store is gone or silent."""
        self.beats_at = time.monotonic() + _BEAT
        self.num_beats += 1
        self.board.write(f"beat/{self.options.node_rank}", str(self.num_beats))
        if self.board.is_lost or self.board.silent_seconds > _NODE_TIMEOUT:
            host = self.options.master_addr
            raise _JobFailed(f"the launcher on {host}, which hosts the job's store, is gone or cannot be reached", 1)

    def result(self) -> None:
        """Wait for the other nodes. Raises _JobFailed if no process of the job has ended well."""
        status, sentence = (self.failure[1], self.failure[0]) if self.failure else (0, "")
        nodes = range(self.options.nnodes)
        own = f"result/{self.options.node_rank}"
        watch, results = Watch(_BEAT), {}
        while True:
            if results.get(self.options.node_rank) is None:  # again where the store was silent
                self.board.write(own, f"{self.num_ended_well} {status} {sentence}")
            results |= {node: self.board.read(f"result/{node}") for node in nodes if results.get(node) is None}
            silent = [node for node in nodes if results[node] is None and watch.silence(str(node)) > _NODE_TIMEOUT]
            if all(results[node] is not None or node in silent for node in nodes):
                break
            watch.look({str(node): self.board.read(f"beat/{node}") or "" for node in nodes if results[node] is None})
            self.beat()
            time.sleep(_BEAT)
        if self.options.nnodes > 1:
            self._part(len(nodes) - len(silent))
        ends = [text.split(" ", 2) for text in results.values() if text is not None]
        if not any(int(num_ended_well) for num_ended_well, _, _ in ends):
            status, sentence = next((status, sentence) for _, status, sentence in ends if status != "0")
            raise _JobFailed(sentence, int(status))

    def _part(self, num_nodes: int) -> None:
        """Leave the store, node 0 last."""
        num_left, deadline = self.board.count("left", 1), time.monotonic() + ANSWER_PATIENCE
        while self.options.node_rank == 0 and num_left < num_nodes and time.monotonic() < deadline:
            time.sleep(_POLL)
            num_left = self.board.count("left")


def say(sentence: str) -> None:
    sys.stderr.write(f"launch: {sentence}\n")
    sys.stderr.flush()


def run(options: argparse.Namespace) -> int:
    """Run the job's processes of this node to their end. Returns the exit status. Raises ValueError."""
    is_first = options.node_rank == 0
    _require_known_host(options)
    try:
        store = TCPStore(options.master_addr, options.master_port, is_master=is_first, wait_for_workers=False)
    except RuntimeError as error:
        where = f"{options.master_addr}:{options.master_port}"
        if is_first:
            raise ValueError(f"no store can be opened at {where}; choose another --master-port") from error
        raise ValueError(
            f"found no job at {where}; check --master-addr, --master-port, and that node 0 was started"
        ) from error
    board = FailureBoard(store, scope=LAUNCHER, host=socket.gethostname())
    with (
        command_line.unwinding("all processes of the job on this node are ended"),
        tempfile.TemporaryDirectory(prefix="launch_") as folder,
    ):
        node = _Node(options, Path(folder), store.port, board)
        try:
            node.start()
            node.watch()
            node.result()
        except _JobFailed as failure:
            say(f"{failure}; the job is ended")
            return failure.status
        finally:
            node.end_all()
    return 0


def _require_known_host(options: argparse.Namespace) -> None:
    """Raise ValueError if --master-addr is no address and no name that has one; torch would ask for it for minutes.

    On other nodes than the first the name may get its address a little later, as that of a container does.
    """
    host, deadline = options.master_addr, time.monotonic() + (_NAME_PATIENCE if options.node_rank else 0.0)
    waits = False
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:  # UnicodeError: of a name that is empty or too long
            if isinstance(error, UnicodeError) or not host or time.monotonic() >= deadline:
                reason = getattr(error, "strerror", None) or "no name of a host"
                raise ValueError(f"--master-addr {host or repr('')} has no address ({reason}); name node 0") from error
        if not waits:
            say(f"--master-addr {host} has no address yet; asks again for {_NAME_PATIENCE:g} seconds")
        waits = True
        time.sleep(_BEAT)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.parser_of(__doc__)
    command_line.add_flags(
        parser,
        ("--nproc-per-node", flag_types.count, "N", "processes on each node", {"required": True}),
        ("--max-restarts", flag_types.count_from_0, "K", "how often a lost process is started again", {"default": 0}),
        ("--nnodes", flag_types.count, "N", "nodes of the job", {"default": 1}),
        ("--node-rank", flag_types.count_from_0, "N", "number of this node, from 0", {"default": 0}),
        ("--master-addr", str, "HOST", "host of node 0", {"default": "127.0.0.1"}),
        (
            "--master-port",
            flag_types.count_from_0,
            "PORT",
            "port of the store there; 0: any free one",
            {"default": 0},
        ),
        ("-m --module", None, None, "the script is the name of a module"),
        ("script", str, "SCRIPT", "program to run"),
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the program's arguments")
    parser.fromfile_prefix_chars = None  # `@FILE` is for the program
    return command_line.run(_run, parser.parse_args(arguments))


def _run(options: argparse.Namespace) -> int:
    if options.node_rank >= options.nnodes:
        raise ValueError(f"--node-rank {options.node_rank} is not below --nnodes {options.nnodes}; number nodes from 0")
    if options.master_port > _LAST_PORT:
        raise ValueError(f"--master-port {options.master_port} is no port; give one up to {_LAST_PORT}, or 0 for any")
    if options.nnodes > 1 and options.master_port == 0:
        raise ValueError("--nnodes above 1 needs --master-addr and --master-port, at which all nodes find node 0")
    return run(options)
