"""tools/hosts.py: hosts of their own, a link that is counted, slowed and cut, and nothing left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.network_hosts import make_hosts
from tools import hosts as tool
from tools.hosts import Hosts, HostsUnavailable

TOOL = Path(tool.__file__)
NUM_BYTES = 2_000_000
RECEIVE = "import socket; s = socket.create_server(('', 5000)); print('listening', flush=True); c, _ = s.accept()\n"
RECEIVE += "n = 0\nwhile part := c.recv(1 << 20): n += len(part)\nprint(n)"
SEND = f"import socket; socket.create_connection(('host0', 5000), 1).sendall(bytes({NUM_BYTES}))"


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-c", code]


def namespaces(pid: int | str) -> tuple[int, ...]:
    return tuple(os.stat(f"/proc/{pid}/ns/{kind}").st_ino for kind in ("net", "uts", "mnt"))


def transfer(hosts: Hosts, send: str = SEND) -> float:
    """Seconds from connecting until host0 has all bytes of host1."""
    receiver = subprocess.Popen(hosts.command(0, python(RECEIVE)), stdout=subprocess.PIPE, text=True)
    assert receiver.stdout.readline() == "listening\n"
    start = time.monotonic()
    subprocess.run(hosts.command(1, python(send)), check=True, timeout=60)
    assert receiver.communicate(timeout=60)[0] == f"{NUM_BYTES}\n"
    return time.monotonic() - start


def test_a_machine_with_namespaces_gets_hosts():
    """Where a plain `unshare` may make a namespace and a link in it, hosts can be made: no test is skipped for a fault
    of ours."""
    own_user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    link = ["ip", "link", "add", "one", "type", "veth", "peer", "name", "two"]
    try:
        subprocess.run(["unshare", *own_user, "--net", "--uts", "--mount", *link], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine makes no namespaces: {error}")
    with Hosts(2, bytes_per_second=1e7):
        pass


def test_hosts_are_places_of_their_own(tmp_path):
    """Each host has its name, its address and its loopback device, knows the others by name, and sees the files."""
    code = "import os, socket; print(socket.gethostname(), *map(socket.gethostbyname, ('host0', 'host1')), os.getcwd())"
    with make_hosts(2) as hosts:
        for index in range(2):
            command = hosts.command(index, python(code), directory=tmp_path)
            said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split()
            assert said == [hosts.names[index], *hosts.addresses, str(tmp_path)]
    assert os.uname().nodename not in hosts.names


def test_counters_rate_and_link():
    """What was sent is counted once, with headers, but for what TCP sends again on a busy machine; a rate bounds it
    from below in time; a link that is down carries nothing, and carries again when it is up."""
    with make_hosts(2) as hosts:
        before = [hosts.traffic(index) for index in range(2)]
        transfer(hosts)
        sender, receiver = (hosts.traffic(1).since(before[1]), hosts.traffic(0).since(before[0]))
        most = 1.06 * NUM_BYTES + hosts.resent_bytes(1)  # headers: 66 bytes in at least every 1,514
        assert NUM_BYTES <= sender.sent <= most and NUM_BYTES <= receiver.received <= most
        assert sender.received < 0.06 * NUM_BYTES and receiver.sent < 0.06 * NUM_BYTES  # acknowledgements
        hosts.set_link(1, up=False)
        cut = subprocess.run(hosts.command(1, python(SEND)), capture_output=True, text=True, timeout=60)
        assert cut.returncode != 0 and ("timed out" in cut.stderr or "unreachable" in cut.stderr), cut.stderr
        hosts.set_link(1, up=True)
        hosts.set_rate(2e6)
        assert transfer(hosts) > (NUM_BYTES - tool.burst_bytes(2e6)) / 2e6
        hosts.set_rate(None)


@pytest.mark.full
def test_what_is_sent_again_is_known():
    """Bytes that were lost on the way to a host whose cable was pulled: its peer sends them again, and nothing else
    makes the device count more than there was to send."""
    with make_hosts(2, bytes_per_second=2e6) as hosts:
        sending = threading.Thread(target=transfer, args=[hosts, SEND.replace("1)", "60)")])
        sending.start()
        wait_until(lambda: hosts.traffic(1).sent > NUM_BYTES / 8)
        hosts.set_link(0, up=False)
        wait_until(lambda: hosts.resent_bytes(1) > 0)
        hosts.set_link(0, up=True)
        sending.join()
        assert NUM_BYTES <= hosts.traffic(1).sent <= 1.06 * NUM_BYTES + hosts.resent_bytes(1)


def wait_until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_command_line_runs_on_every_host_and_counts():
    """The command runs once on each host; its output is passed on, then the bytes; the first failure is the status."""
    command = [sys.executable, str(TOOL), "--hosts", "3", "--", "sh", "-c", "hostname; test $(hostname) != host2"]
    with make_hosts(1):  # or skip
        pass
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and sorted(lines[:3]) == ["host0", "host1", "host2"], done.stdout + done.stderr
    assert [line.split(" sent ")[0] for line in lines[3:]] == ["host0", "host1", "host2"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left(tmp_path, number):
    """Interrupted or killed, the program leaves no process, and so no namespace, that it has made."""
    own = namespaces("self")
    note = tmp_path / "pid"
    with make_hosts(1):  # or skip
        pass
    hold = ["sh", "-c", f"echo $$ >> {note}; exec sleep 60"]
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit SIG_IGN
    program = subprocess.Popen([sys.executable, str(TOOL), "--hosts", "1", "--", *hold], start_new_session=True)
    signal.signal(signal.SIGINT, ignored)
    deadline = time.monotonic() + 30
    while not (note.exists() and note.read_text().endswith("\n")):
        assert program.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    inside = int(note.read_text())
    made = namespaces(inside)
    assert not set(made) & set(own)
    program.send_signal(number)
    program.wait(30)
    while (left := processes_in(made)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def processes_in(made: tuple[int, ...]) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and set(namespaces(entry.name)) & set(made):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_without_the_commands_it_says_so(monkeypatch, capsys):
    """A machine without iproute2: one sentence that names what is missing, and status 1."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(tool, "_SYSTEM_DIRECTORIES", ())
    with pytest.raises(HostsUnavailable, match="need the commands ip, tc, unshare, nsenter, setpriv"):
        Hosts(2).__enter__()
    assert tool.main(["--", "true"]) == 1
    assert capsys.readouterr().err.startswith("hosts.py: error: hosts need the commands ip")


def test_numbers_that_make_no_sense_are_refused(capsys):
    """No host, a rate of nothing or beyond all: said with the value and what to give."""
    assert tool.main(["--hosts", "0", "--", "true"]) == 1
    assert "0 hosts cannot be made; give 1 to 200" in capsys.readouterr().err
    for rate in ("0", "nan", "inf", "1e308", "1e30"):
        assert tool.main(["--rate", rate, "--", "true"]) == 1
        assert "is not a rate" in capsys.readouterr().err


def test_a_user_who_is_not_root_gets_hosts():
    """In a user namespace of their own, where the machine lets users make them."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    interpreter = "/usr/bin/python3"  # one that everybody may start
    source = TOOL.read_text()
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    may = subprocess.run([*nobody, "unshare", "--user", "--map-root-user", "--net", interpreter, "-c", ""], check=False)
    if may.returncode:
        pytest.skip("this machine lets no user make namespaces")
    command = [*nobody, interpreter, "-c", source, "--", "hostname"]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert {"host0", "host1"} <= set(done.stdout.split())
