"""Train a ViT that tells classes of images through a pipeline program. See docs/classification.md and docs/flags.md.

torchrun --nproc-per-node 2 pretrain_vision_classify.py --pipeline-model-parallel-size 2 --data-path TRAIN VALID ...
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("megatron.trainer.programs.pretrain_vision_classify", run_name="__main__", alter_sys=True)
