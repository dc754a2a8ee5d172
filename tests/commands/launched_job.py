"""A job that test_launch.py starts: `python launched_job.py MODE`.

Without torch: `environment` (each rank prints what it was given), `fail` (rank 1 writes its error file and ends with
status 7), `kill` (rank 1 kills itself), `hang` (each rank starts a child in a session of its own; both are deaf).

With a membership: `survive` (rank 1 kills itself and rank 2 stops itself; new processes take their places, if they are
started), `give-up` (the same, and then rank 0 says that the job no longer accepts losses), `cut` (ranks 2 and 3 are on
a host that is cut off; the others end when they have noticed).
"""

import os
import signal
import subprocess
import sys
import time

RANK, IS_NEW = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # in one piece, whoever else writes


def without_torch(mode: str) -> None:
    if mode == "environment":
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_USE_AGENT_STORE")
        say(" ".join([*(os.environ[name] for name in names), *sys.argv[2:]]))
        return
    if mode == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", DEAF], start_new_session=True)
        say(f"{os.getpid()} {child.pid}")
    if RANK == 1 and mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if RANK == 1 and mode == "fail":
        from megatron.pipeline.runtime.failure.errors import write_error_file

        write_error_file("the disk is full")
        sys.exit(7)
    time.sleep(600)


def with_membership(mode: str) -> None:
    from torch.distributed import TCPStore

    from megatron.pipeline.runtime.failure.membership import Membership

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    membership = Membership(store, RANK, int(os.environ["WORLD_SIZE"]), failure_timeout=8.0)
    membership.accept_losses()
    epoch = membership.begin(60)
    say(f"rank {RANK}: epoch {epoch.number} with {epoch.ranks}, joined {epoch.joined}")
    if RANK == 1 and not IS_NEW and mode != "cut":
        os.kill(os.getpid(), signal.SIGKILL)
    if RANK == 2 and not IS_NEW and mode != "cut":
        os.kill(os.getpid(), signal.SIGSTOP)
    wanted = (0, 1) if mode == "cut" else (0, 3)
    if "--restarts" in sys.argv:
        wanted = tuple(range(membership.world_size))
    while epoch.number == 0 or epoch.ranks != wanted:
        if membership.alarm is not None:
            epoch = membership.agree(timeout=60)
        elif set(wanted) - set(epoch.ranks) and set(membership.newcomers()) == set(wanted) - set(epoch.ranks):
            epoch = membership.agree(admits=True, timeout=60)
        else:
            time.sleep(0.02)
            continue
        say(f"rank {RANK}: epoch {epoch.number} with {epoch.ranks}, joined {epoch.joined}")
        if mode == "give-up":
            if RANK != 0:
                time.sleep(600)
            membership.accept_losses(False)
            sys.exit(5)
    membership.leave()
    os._exit(0)


if __name__ == "__main__":
    (with_membership if sys.argv[1] in ("survive", "give-up", "cut") else without_torch)(sys.argv[1])
