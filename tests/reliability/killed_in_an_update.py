"""pretrain_gpt.py that kills itself in the middle of the host optimizer's update of a stage.

KILLED_IN_UPDATE says in which of its updates, from 1: moments and masters of the stage are stepped, its weights are not
written yet.
"""

import os
import signal
import sys

from megatron.trainer.programs import pretrain_gpt
from megatron.trainer.run import entry


def kill_in_update(number: int) -> None:
    """From now on, the process ends in its update of that number."""
    from megatron.pipeline.runtime.relay.host_store import HostStore

    write_weights, num_begun = HostStore.write_weights, 0

    def watched(store, stage):
        nonlocal num_begun
        num_begun += 1
        if num_begun == number:
            os.kill(os.getpid(), signal.SIGKILL)
        write_weights(store, stage)

    HostStore.write_weights = watched


def program():
    """As pretrain_gpt.program."""
    if number := os.environ.get("KILLED_IN_UPDATE"):
        kill_in_update(int(number))
    return pretrain_gpt.program()


if __name__ == "__main__":
    sys.exit(entry.run("pretrain_gpt.py", program))
