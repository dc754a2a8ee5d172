"""Several hosts on one machine, as network namespaces: to try what a job does between hosts, and to test it.

    python tools/hosts.py --hosts 2 -- torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \\
        --rdzv-endpoint host0:29400 --rdzv-id 1 pretrain_gpt.py ...
    python tools/hosts.py --hosts 2 --rate 200 -- COMMAND      # every host sends at most 200 Mbit/s

runs COMMAND on each host at the same time, then prints the bytes that each has sent and received. The hosts are named
host0, host1, ... and have addresses of their own; files, processors and process ids are the machine's. The exit status
is that of the first command that failed.

Problem: processes on one machine reach each other whatever they were told about hosts, and no counter says what would
have crossed a network. Solution: each host has a network of its own, joined to the others' by a switch (a bridge in a
namespace of its own, so that the machine's own network is not touched), a host name, and an /etc/hosts with all names.
Nothing of it has a name on the machine: a namespace lives as long as a process is in it, and the process that holds it
open reads from a pipe and ends when this program does, whichever way. So nothing is left to clean up after kill -9.

Needs Linux, `ip`, `tc`, `unshare` and `nsenter`, and root or the permission to make user namespaces.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

_TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv")
_SYSTEM_DIRECTORIES = ("/usr/sbin", "/sbin")  # where `tc` lies, and the search path of users often does not lead
_LARGEST_FRAME = 1514  # bytes: 1,500 of IP, and Ethernet's header
_PATIENCE = 20.0  # seconds for a namespace to come up, on a busy machine
_HIGHEST_RATE = 1e11  # bytes/s: the burst of a limit is a 32-bit number
_BURST_SECONDS = 0.01  # what a link at rest sends beyond its rate
_LEAST_BURST = 16 << 10  # bytes: some whole frames
# A private /etc/hosts without a file on the machine: written to memory, bound over the real one.
_SETUP = (
    'hostname "$1" && mount -t tmpfs hosts /tmp && printf "$2" >/tmp/hosts && mount --bind /tmp/hosts /etc/hosts && '
    "umount /tmp && ip link set lo up && echo ready && exec cat"
)


class HostsUnavailable(RuntimeError):
    """This machine cannot make hosts; the text says why."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of whole Ethernet frames that a host has sent and received since it was made."""

    sent: int
    received: int

    def since(self, before: "Traffic") -> "Traffic":
        return Traffic(self.sent - before.sent, self.received - before.received)


def own_traffic(device: str = "eth0") -> Traffic:
    """What the host in which this process runs has sent and received through a device."""
    with open("/proc/self/net/dev") as table:
        for line in table:
            name, _, counters = line.partition(":")
            if name.strip() == device:
                numbers = counters.split()
                return Traffic(sent=int(numbers[8]), received=int(numbers[0]))
    raise ValueError(f"this host has no network device {device}")


def resent_bytes(process: int | str = "self") -> int:
    """How much TCP has sent again, at most, on the host in which a process runs, by its kernel's count of segments.

    The device counts it like all else. It depends on the machine: where nobody has time to read, frames are dropped, or
    acknowledged late.
    """
    with open(f"/proc/{process}/net/snmp") as table:
        names, numbers = (line.split() for line in table if line.startswith("Tcp:"))
    return int(numbers[names.index("RetransSegs")]) * _LARGEST_FRAME


def burst_bytes(bytes_per_second: float) -> int:
    """What a limited link may send at once after a rest."""
    return max(int(bytes_per_second * _BURST_SECONDS), _LEAST_BURST)


class Hosts:
    """`count` hosts on one switch; a context manager. `bytes_per_second`: what each may send, None for no limit.

    Raises:
        HostsUnavailable: when it is entered.
    """

    def __init__(self, count: int, *, bytes_per_second: float | None = None) -> None:
        if not 1 <= count <= 200:
            raise ValueError(f"{count} hosts cannot be made; give 1 to 200")
        if bytes_per_second is not None and not 1000 <= bytes_per_second <= _HIGHEST_RATE:
            raise ValueError(
                f"{bytes_per_second} bytes/s is not a rate that a link here can be held to; give at least 1000 and at "
                f"most {_HIGHEST_RATE:.0e}, or no rate for no limit"
            )
        self.names = tuple(f"host{index}" for index in range(count))
        self.addresses = tuple(f"10.0.0.{index + 1}" for index in range(count))
        self._bytes_per_second = bytes_per_second
        self._holders: list[subprocess.Popen] = []

    def __enter__(self) -> "Hosts":
        missing = [name for name in _TOOLS if shutil.which(name, path=_search_path()) is None]
        if missing:
            raise HostsUnavailable(f"hosts need the commands {', '.join(missing)}; install iproute2 and util-linux")
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the hosts; each is gone when the last process in it has ended."""
        for holder in self._holders:
            holder.stdin.close()
        for holder in self._holders:
            holder.wait()
            holder.stdout.close()
        self._holders.clear()

    def command(self, host: int, command: Sequence[str], *, directory: str | os.PathLike = ".") -> list[str]:
        """What to start on this machine to have `command` run on a host, in `directory`; its process id is kept."""
        within = self._enter(1 + host, "--net", "--uts", "--mount")
        return [*within, "env", f"--chdir={os.path.abspath(directory)}", *command]

    def traffic(self, host: int) -> Traffic:
        """What has passed a host's end of its link, read at the switch."""
        text = self._at_switch("ip", "-stats", "-json", "link", "show", "dev", f"port{host}")
        counters = json.loads(text)[0]["stats64"]
        return Traffic(sent=counters["rx"]["bytes"], received=counters["tx"]["bytes"])

    def resent_bytes(self, host: int) -> int:
        """How much of that a host has sent again, at most."""
        return resent_bytes(self._holders[1 + host].pid)

    def set_link(self, host: int, *, up: bool) -> None:
        """Pull a host's cable out of the switch, or plug it in again.

        When this returns, the switch has seen it, and no host waits for the answer to what it asked meanwhile.
        """
        port = f"port{host}"
        self._at_switch("ip", "link", "set", port, "up" if up else "down")
        until, state = time.monotonic() + _PATIENCE, "UP" if up else "DOWN"
        while json.loads(self._at_switch("ip", "-json", "link", "show", "dev", port))[0]["operstate"] != state:
            if time.monotonic() > until:
                raise HostsUnavailable(f"the switch does not see {port} {state.lower()} after {_PATIENCE:g} s")
            time.sleep(0.01)
        for index in range(len(self.names)):
            _run([*self._enter(1 + index, "--net"), "ip", "neighbour", "flush", "dev", "eth0"])

    def set_rate(self, bytes_per_second: float | None) -> None:
        """Limit what each host sends from now on; None lifts the limit."""
        for index in range(len(self.names)):
            device = [*self._enter(1 + index, "--net"), "tc", "qdisc"]
            if bytes_per_second is not None:
                rate, burst = f"{bytes_per_second * 8:.0f}bit", str(burst_bytes(bytes_per_second))
                limit = ["tbf", "rate", rate, "burst", burst, "latency", "1s"]  # waits for a second before it drops
                _run([*device, "replace", "dev", "eth0", "root", *limit])
            elif self._bytes_per_second is not None:
                _run([*device, "del", "dev", "eth0", "root"])
        self._bytes_per_second = bytes_per_second

    # -- making them ----------------------------------------------------------------------------------------------

    def _build(self) -> None:
        own_user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        self._hold(["unshare", *own_user, "--net", "sh", "-c", "echo ready && exec cat"], "a network namespace")
        self._at_switch("ip", "link", "add", "bridge0", "type", "bridge")
        self._at_switch("ip", "link", "set", "bridge0", "up")
        lines = "".join(f"{pair[1]} {pair[0]}\\n" for pair in zip(self.names, self.addresses, strict=True))
        names = f"127.0.0.1 localhost\\n{lines}"
        for index, name in enumerate(self.names):
            inside = ["unshare", "--net", "--uts", "--mount", "sh", "-c", _SETUP, "sh", name, names]
            self._hold([*(self._enter(0) if own_user else []), *inside], f"the namespaces of {name}")
            self._connect(index)
        if self._bytes_per_second is not None:
            self.set_rate(self._bytes_per_second)

    def _connect(self, index: int) -> None:
        port, holder = f"port{index}", self._holders[1 + index]
        ends = ["ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid)]
        self._at_switch(*ends)
        self._at_switch("ip", "link", "set", port, "master", "bridge0", "up")
        inside = self._enter(1 + index, "--net")
        _run([*inside, "ip", "address", "add", f"{self.addresses[index]}/24", "dev", "eth0"])
        _run([*inside, "ip", "link", "set", "eth0", "up"])

    def _hold(self, command: list[str], what: str) -> None:
        """Start a process that keeps namespaces open until its input ends."""
        pipe = subprocess.PIPE
        holder = subprocess.Popen(
            command, env=_environment(), stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        self._holders.append(holder)
        overdue = threading.Timer(_PATIENCE, holder.kill)
        overdue.start()
        is_ready = holder.stdout.readline() == "ready\n"
        overdue.cancel()
        if not is_ready:
            holder.stdin.close()
            said = " ".join(holder.stderr.read().split())
            raise HostsUnavailable(f"this machine does not let us make {what} ({said or 'no answer'}); try as root")
        holder.stderr.close()

    def _enter(self, holder: int, *kinds: str) -> list[str]:
        """The start of a command that runs in a holder's namespaces."""
        own_user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(self._holders[holder].pid), *own_user, *kinds]

    def _at_switch(self, *command: str) -> str:
        return _run([*self._enter(0, "--net"), *command])


def _search_path() -> str:
    return os.pathsep.join((os.environ.get("PATH", os.defpath), *_SYSTEM_DIRECTORIES))


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": _search_path()}


def _run(command: list[str]) -> str:
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True)
    if done.returncode:
        raise HostsUnavailable(f"`{' '.join(command)}` failed: {' '.join(done.stderr.split())}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="number of hosts (default 2)")
    parser.add_argument("--rate", type=float, metavar="MBIT", help="Mbit/s that each may send (default: no limit)")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --: what to run on each host")
    args = parser.parse_args(arguments)
    try:
        with Hosts(args.hosts, bytes_per_second=None if args.rate is None else args.rate * 1e6 / 8) as hosts:
            return _run_everywhere(hosts, args.command)
    except (HostsUnavailable, ValueError) as error:
        print(f"hosts.py: error: {error}", file=sys.stderr)
        return 1


def _run_everywhere(hosts: Hosts, command: list[str]) -> int:
    # The commands end with this program, however it ends.
    mortal = ["setpriv", "--pdeathsig", "TERM", *command]
    running = [subprocess.Popen(hosts.command(index, mortal)) for index in range(len(hosts.names))]
    try:
        statuses = [process.wait() for process in running]
    except BaseException:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
        raise
    for index, name in enumerate(hosts.names):
        traffic = hosts.traffic(index)
        print(f"{name} sent {traffic.sent:,} bytes and received {traffic.received:,}")
    return next((status if status > 0 else 1 for status in statuses if status), 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
