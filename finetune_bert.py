"""Fine-tune a BERT to tell classes of texts through a pipeline program. See docs/classification.md and docs/flags.md.

torchrun --nproc-per-node 2 finetune_bert.py --pipeline-model-parallel-size 2 --pretrained-checkpoint CHECKPOINTS \
    --train-data train.jsonl --valid-data validation.jsonl --epochs 3 ...
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("megatron.trainer.programs.finetune_bert", run_name="__main__", alter_sys=True)
