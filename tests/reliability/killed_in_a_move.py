"""pretrain_gpt.py with one rank that kills itself in the middle of a move of saved activations.

KILLED_RANK names it. It is killed when the move KILLED_IN_MOVE (from 1, of those that arrive at this rank) has its
buffer, but nothing in it yet: after half a second, in which the other end has begun to send. It prints when, in seconds
of the machine's steady clock.
"""

import os
import signal
import sys
import time

from megatron.trainer.programs import pretrain_gpt
from megatron.trainer.run import entry


def kill_in_move(number: int) -> None:
    """From now on, the process ends in its move of that number."""
    from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory

    take_buffer, num_taken = ActivationMemory.take_buffer, 0

    def watched(memory, num_bytes, **options):
        nonlocal num_taken
        buffer = take_buffer(memory, num_bytes, **options)
        num_taken += not options  # an eviction's buffer stands in for a graph's memory
        if num_taken == number:
            time.sleep(0.5)
            print(f"killed at {time.monotonic()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return buffer

    ActivationMemory.take_buffer = watched


def program():
    """As pretrain_gpt.program."""
    if os.environ["RANK"] == os.environ["KILLED_RANK"]:
        kill_in_move(int(os.environ["KILLED_IN_MOVE"]))
    return pretrain_gpt.program()


if __name__ == "__main__":
    sys.exit(entry.run("pretrain_gpt.py", program))
