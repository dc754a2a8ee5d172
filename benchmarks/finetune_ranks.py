"""What the processes of the fine-tuning benchmarks run: `finetune.py`'s runs one after another, on one partition.

torchrun --nproc-per-node 4 benchmarks/finetune_ranks.py commands.json
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import backend

if __name__ == "__main__":
    backend.install()
    from benchmarks.finetune_runs import run_all

    run_all(Path(sys.argv[1]))
