"""Fine-tune a Hugging Face model through a pipeline of stages. See docs/finetuning.md.

torchrun --nproc-per-node 4 finetune.py --model_name_or_path FOLDER --task sequence-classification --train_file F ...
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("megatron.finetuning.finetune", run_name="__main__", alter_sys=True)
