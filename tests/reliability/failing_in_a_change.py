"""pretrain_gpt.py of which rank 1 alone fails in the groups of its first change of the pipeline, while the others wait
in them."""

import argparse
import errno
import os
import sys
import time
from datetime import timedelta

from megatron.trainer.programs import pretrain_gpt
from megatron.trainer.run import entry

PATIENCE = 3.0
WENT_WRONG = "goes wrong at"


def fail_in_groups() -> None:
    """From now on."""
    from megatron.trainer.changes import change

    change.PATIENCE = timedelta(seconds=PATIENCE)

    def without_files(args: argparse.Namespace) -> None:
        print(WENT_WRONG, time.monotonic(), flush=True)
        raise OSError(errno.EMFILE, "Too many open files")

    if os.environ["RANK"] == "1":
        change.make_groups = without_files


def program():
    """As pretrain_gpt.program."""
    fail_in_groups()
    return pretrain_gpt.program()


if __name__ == "__main__":
    sys.exit(entry.run("pretrain_gpt.py", program))
