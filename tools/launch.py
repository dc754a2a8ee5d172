"""The command of this file's name, from a checkout: `megatron/commands/__main__.py` says which there are."""

import sys
from pathlib import Path

if __name__ == "__main__":
    here = Path(__file__).resolve()
    sys.path.insert(0, str(here.parents[1]))  # the sources beside, installed or not
    from megatron.commands.__main__ import run

    sys.exit(run(here.stem))
