"""The model with its adapter merged in, in files that `from_pretrained` loads.

Each rank merges and writes its share of the model's tensors, one file after another: it reads them from the model's
folder and the adapter from PEFT's file. So no process ever holds the model. A layer is merged by PEFT's own module, a
copy of it with real tensors.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron.finetuning.adapters import Adapter
from megatron.finetuning.checkpoint import all_write, places, replace_folder, write_index
from megatron.finetuning.pretrained import Pretrained
from megatron.pipeline.runtime.failure.agreement import gathered
from megatron.trainer.checkpoint.directory import sync_directory, sync_file

FILE_BYTES = 4e9
"""The largest file, unless tensors that have to lie in one file are larger."""


def require_mergeable(adapter: Adapter, pretrained: Pretrained) -> None:
    """Check that each changed tensor stands alone. Raises ValueError for one that the configuration ties to another."""
    changed = _changed(adapter)
    for name in pretrained.own_names:
        names = pretrained.names_of(name)
        if len(names) > 1 and not changed.keys().isdisjoint(names):
            raise ValueError(
                f"{' and '.join(names)} are one tensor, and the adapter changes it in one place, so no merged model "
                "computes the same; leave that module or --merge_adapter out"
            )


def save_merged(
    adapter: Adapter, pretrained: Pretrained, adapter_folder: Path, folder: Path, *, dtype: torch.dtype | None,
    save_rest: Callable[[Path], None], file_bytes: float = FILE_BYTES,
) -> None:  # fmt: skip
    """Write the merged model as `folder`. `dtype`: None: the dtype in the model's files.

    Collective: every rank must call it. `save_rest`: writes all but the tensors; called on rank 0. Raises ValueError on
    all ranks if any rank cannot write.
    """
    rank = torch.distributed.get_rank()
    folder, partial = places(folder)
    with all_write(folder):
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    try:
        _write_merged(adapter, pretrained, adapter_folder, folder, partial, dtype, save_rest, file_bytes)
    except ValueError:  # all ranks raise it, and none writes any longer
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_merged(
    adapter: Adapter, pretrained: Pretrained, adapter_folder: Path, folder: Path, partial: Path,
    dtype: torch.dtype | None, save_rest: Callable[[Path], None], file_bytes: float,
) -> None:  # fmt: skip
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    shares = _shares(pretrained, size, file_bytes)
    names = [f"model-{number:05d}-of-{len(shares):05d}.safetensors" for number in range(1, len(shares) + 1)]
    own: dict[str, dict[str, int]] = {}
    with all_write(folder):
        values = adapter.read(adapter_folder)
        for name, share in list(zip(names, shares, strict=True))[rank::size]:
            tensors = pretrained.reverted(merged_tensors(adapter, pretrained, values, share, dtype))
            save_file(tensors, partial / name, metadata={"format": "pt"})
            sync_file(partial / name)
            own[name] = {each: tensor.nbytes for each, tensor in tensors.items()}
    of_rank = gathered(own)
    with all_write(folder):
        if rank == 0:
            write_index(partial, {name: sizes for files in of_rank for name, sizes in files.items()})
            save_rest(partial)
            sync_directory(partial)
            replace_folder(folder, partial)


def merged_tensors(
    adapter: Adapter, pretrained: Pretrained, values: Mapping[str, Tensor], names: Iterable[str],
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:  # fmt: skip
    """Some of the model's tensors with the adapter merged in, by their own names.

    `values`: the adapter's tensors, as `Adapter.read` returns them.
    """
    changed = _changed(adapter)
    names = list(names)
    found = pretrained.tensors(names, dtype)
    for name in names:
        own = changed.get(name)
        path = own and adapter.layer_of(own)
        if path:
            layer = adapter.layer_with(path, {**values, own: found[name]})
            with torch.no_grad():
                layer.merge()
            found[name] = layer.get_parameter(own.removeprefix(f"{path}.")).detach()
        elif own:  # of a module that is trained whole
            found[name] = values[own] if dtype is None else values[own].to(dtype)
    return found


def _changed(adapter: Adapter) -> dict[str, str]:
    """Name in the model -> name in the adapted model, of each tensor that a merge changes."""
    trained, with_bias = adapter.trained | adapter.written.keys(), adapter.config.lora_bias
    return {
        name: own
        for own, name in adapter.base_names.items()
        if own in trained or (adapter.layer_of(own) and (with_bias or not own.endswith(".bias")))
    }


def _shares(pretrained: Pretrained, size: int, file_bytes: float) -> list[list[str]]:
    """The names of the tensors of each file: a file for each rank or more, of about the same bytes each."""
    groups: dict[str, list[str]] = {}
    for name in pretrained.own_names:
        groups.setdefault(pretrained.written_with(name), []).append(name)
    total = pretrained.num_bytes(pretrained.own_names)
    count = max(size, -int(-total // file_bytes))
    shares: list[list[str]] = [[] for _ in range(count)]
    begun = 0
    for names in groups.values():
        shares[min(begun * count // max(total, 1), count - 1)] += names
        begun += pretrained.num_bytes(names)
    return [share for share in shares if share]
