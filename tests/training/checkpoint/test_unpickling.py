"""What a file names is not called: the index of a checkpoint and the objects beside its tensors."""

import io
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron import backend

backend.install()

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.training.checkpoint import unpickling

unpickling.install()


class Called:
    """Pickled as a call that leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


def index(**entries) -> Metadata:
    tensor = TensorStorageMetadata(
        TensorProperties(dtype=torch.bfloat16),
        torch.Size([2, 3]),
        [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))],
    )
    return Metadata(
        {"weight": tensor, "object": BytesStorageMetadata(), **entries}, None, {MetadataIndex("weight"): ()}
    )


def write(folder: Path, content: object) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(content))


def test_an_index_is_read(tmp_path):
    """What torch writes is read as it was, dtypes, layouts and memory formats included."""
    write(tmp_path, index())
    found = FileSystemReader(str(tmp_path)).read_metadata()
    assert found.state_dict_metadata == index().state_dict_metadata
    assert TorchDistLoadShardedStrategy().load_tensors_metadata(tmp_path).keys() == {"weight"}


@pytest.mark.parametrize(
    "read",
    [
        lambda folder: FileSystemReader(str(folder)).read_metadata(),
        lambda folder: TorchDistLoadShardedStrategy().load_tensors_metadata(folder),
    ],
)
def test_nothing_in_an_index_is_called(tmp_path, read):
    """torch's reader and megatron.core's refuse an index that names a function, and do not call it."""
    write(tmp_path, index(other=Called(tmp_path / "trace")))
    with pytest.raises(pickle.UnpicklingError, match="does not belong into the index"):
        read(tmp_path)
    assert not (tmp_path / "trace").exists()


def test_nothing_in_an_object_is_called(tmp_path):
    """Nor is it in what lies beside the tensors; plain objects are read."""
    planner, item = DefaultLoadPlanner(), SimpleNamespace(dest_index=MetadataIndex("object"))
    planner.flatten_state_dict, planner.state_dict = False, {}
    for content in ({"step": 3}, Called(tmp_path / "trace")):
        file = io.BytesIO()
        torch.save(content, file)
        file.seek(0)
        if isinstance(content, Called):
            with pytest.raises(pickle.UnpicklingError):
                planner.load_bytes(item, file)
        else:
            planner.load_bytes(item, file)
            assert planner.state_dict["object"] == content
    assert not (tmp_path / "trace").exists()
