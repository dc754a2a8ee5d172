"""Train a T5 through a pipeline program. See README.md and docs/flags.md.

torchrun --nproc-per-node 2 pretrain_t5.py --pipeline-model-parallel-size 2 --pipeline-schedule 2bw ...
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("megatron.trainer.programs.pretrain_t5", run_name="__main__", alter_sys=True)
