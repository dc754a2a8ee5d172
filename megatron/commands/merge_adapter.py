"""Merge a LoRA adapter into the model that it was trained on.

    python tools/merge_adapter.py BASE ADAPTER --output FOLDER

BASE is the model's folder, ADAPTER one with adapter_config.json and adapter_model.safetensors, as PEFT and finetune.py
write them. FOLDER gets the model that `merge_and_unload` makes, in the dtype of BASE's files, with BASE's tokenizer.
It has to be new or empty, and appears whole or not at all; a link to it stays. Files are made one after another, so the
memory is that of one file.

Exit status: 0; 1 if a file is wrong or does not fit the others; 2 if the command line is wrong or a file cannot be
opened; 130 after Ctrl-C.
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from megatron.documents import command_line
from megatron.documents.command_line import add_flags, require_folder
from megatron.documents.flag_types import count, positive

COPIED = (".json", ".jinja", ".model", ".txt")
"""Suffixes of the files beside the tensors, such as those of a tokenizer."""
NOT_COPIED = ("adapter_config", "model.", "pytorch_model.")
"""Beginnings of the names of an adapter's configuration and of indices of tensors, which the merged model has anew."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.parser_of(__doc__)
    parser.add_argument("base", type=Path, metavar="BASE", help="the folder of the model")
    parser.add_argument("adapter", type=Path, metavar="ADAPTER", help="the folder of the adapter")
    add_flags(
        parser,
        ("--output", Path, "FOLDER", "of the merged model", {"required": True}),
        ("--num-labels", count, "N", "classes of the adapter's head, if they are not BASE's"),
        ("--file-bytes", positive, "BYTES", "largest size of a written file (default: 4e9)", {"default": 4e9}),
    )
    return command_line.run(_run, parser.parse_args(arguments))


def _run(options: argparse.Namespace) -> int:
    require_folder(options.output)
    output = options.output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} is not empty; name a folder that does not exist yet")
    from megatron import backend

    backend.install()
    import torch

    from megatron.finetuning.adapter_config import task_of, written_config
    from megatron.finetuning.adapters import Adapter
    from megatron.finetuning.merge import require_mergeable, save_merged
    from megatron.finetuning.plan import save_model_rest
    from megatron.finetuning.pretrained import Pretrained, open_model
    from megatron.finetuning.samples import TASKS

    config = written_config(options.adapter)
    task = TASKS[task_of(config, options.adapter)]
    changes = {} if options.num_labels is None else {"num_labels": options.num_labels}

    def opened() -> torch.nn.Module:
        return open_model(str(options.base), task.auto_model, changes=changes)

    model = opened()
    adapter, pretrained = Adapter(opened(), config), Pretrained(model, options.base, new_head=task.new_head)
    require_mergeable(adapter, pretrained)

    def save_rest(folder: Path) -> None:
        for path in options.base.iterdir():
            if path.suffix in COPIED and not path.name.startswith(NOT_COPIED):
                shutil.copy(path, folder)
        save_model_rest(folder, model, options.base, getattr(model.config, "dtype", None))

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        save_merged(
            adapter, pretrained, options.adapter, output, dtype=None, save_rest=save_rest,
            file_bytes=options.file_bytes,
        )  # fmt: skip
    finally:
        torch.distributed.destroy_process_group()
    print(f"merged model in {output}")
    return 0
