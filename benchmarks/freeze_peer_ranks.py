"""A rank of `freeze_peers.py`'s peers, which are in freeze_peer_stages.py and need the backend installed.

torchrun --nproc-per-node 2 benchmarks/freeze_peer_ranks.py "torch 1F1B" DEPTH RESULT FLAGS...

FLAGS are those of pretrain_vision_classify.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    from megatron import backend

    backend.install()
    backend.keep_freed_memory()  # as in training
    from benchmarks.freeze_peer_stages import train

    train(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
