"""What the two processes of `finetune_peers.py` run: turns of its arms.

torchrun --nproc-per-node 2 benchmarks/finetune_peer_ranks.py turns.json result.json
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import backend

if __name__ == "__main__":
    backend.install()
    backend.keep_freed_memory()  # as finetune.py, for all arms
    from benchmarks.finetune_peer_runs import run_all

    run_all(Path(sys.argv[1]), Path(sys.argv[2]))
