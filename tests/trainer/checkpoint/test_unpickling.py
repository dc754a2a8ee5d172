"""What a file names is not called: the index of a checkpoint and the objects beside its tensors."""

import io
import pickle
from collections import OrderedDict, defaultdict
from pathlib import Path, PosixPath, PurePosixPath
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, planner
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
from megatron.core.transformer.enums import AttnBackend
from megatron.trainer.checkpoint import unpickling

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


def name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


PLANNER = "torch.distributed.checkpoint.planner"
MEMBER = b"(" + name(PLANNER, "WriteItemType") + b"VSHARD\nt"
INDEX = name("torch.distributed.checkpoint.metadata", "Metadata") + b")\x81"
ATTACKS = {
    "a class": name(PLANNER, "WriteItem"),
    "a path's class": name("pathlib", "PosixPath"),
    "a function": name("torch.serialization", "_get_layout"),
    "a dtype": name("torch", "bfloat16"),
    "a member": name("builtins", "getattr") + MEMBER + b"R",
    "a container": name("collections", "OrderedDict") + b")R",
    "a path": name("pathlib", "PosixPath") + b"(V/tmp\ntR",
}


@pytest.mark.parametrize("what", ATTACKS)
@pytest.mark.parametrize("state", [b"(N}Vtaken\nI1\nst", b"}Vtaken\nI1\ns"], ids=["slots", "plain"])
def test_no_attribute_is_set_but_of_records(what, state):
    """BUILD, which sets attributes, is refused for all that is not a record of the index; nothing has changed then."""
    with pytest.raises(pickle.UnpicklingError, match="sets attributes of"):
        unpickling.IndexUnpickler(io.BytesIO(b"\x80\x02" + ATTACKS[what] + state + b"b.")).load()
    for changed in (planner.WriteItem, planner.WriteItemType.SHARD, PosixPath, torch.serialization._get_layout):
        assert not hasattr(changed, "taken")


@pytest.mark.parametrize(
    "program",
    [
        INDEX + b"(N}Vtaken\nI1\nstb",
        INDEX + b"}V__class__\nI1\nsb",
        INDEX + b"Vkey\nI1\ns",
        INDEX + b"(Vkey\nI1\nu",
        INDEX + b"I1\na",
        INDEX + b"(I1\ne",
        b"\x80\x04" + INDEX + b"(I1\n\x90",
        name("torch.distributed.checkpoint.metadata", "Metadata") + b"(I1\nt\x81",
        INDEX + b")R",
        b"(" + name("torch", "Size") + b"o",
        b"(itorch\nSize\n",
        name("collections", "defaultdict") + b"(" + name("torch.serialization", "_get_layout") + b"tR",
        name("builtins", "getattr") + b"(" + name(PLANNER, "WriteItem") + b"V__init__\ntR",
        name("builtins", "getattr") + b"(" + name(PLANNER, "WriteItemType") + b"V__class__\ntR",
        name("torch.serialization", "_get_layout") + b"(Vtorch.load\ntR",
    ],
)
def test_what_an_index_does_not_need_is_refused(program):
    """Slots, attributes of Python's own, items of a record, arguments of its class, other ways to call or members."""
    with pytest.raises(pickle.UnpicklingError):
        unpickling.IndexUnpickler(io.BytesIO(b"\x80\x02" + program + b".")).load()


@pytest.mark.parametrize("protocol", range(2, 6))
def test_all_that_an_index_may_hold_is_read(protocol):
    content = {
        "items": [planner.WriteItemType.SHARD, torch.Size([2]), torch.strided, torch.float32, (1, 2.5, None, True)],
        "paths": [PosixPath("/tmp/x"), PurePosixPath("y")],
        "containers": [OrderedDict(a=1), defaultdict(list, a=[1]), {1}, frozenset({2})],
        "records": [MetadataIndex("a", torch.Size([0])), TensorProperties(), planner.BytesIOWriteData(3)],
    }
    found = unpickling.IndexUnpickler(io.BytesIO(pickle.dumps(content, protocol=protocol))).load()
    assert found == content
    found["containers"][1]["new"].append(1)


class Altered:
    """Pickled as a member of an enumeration that megatron.core lists, with attributes to be set on it."""


@pytest.mark.parametrize("state", [{"_value_": 1}, (None, {"_value_": 1})], ids=["plain", "slots"])
def test_no_member_of_an_enumeration_is_altered_by_an_object(monkeypatch, state):
    """Members are shared by the whole process."""
    monkeypatch.setattr(Altered, "__reduce__", lambda self: (AttnBackend, (AttnBackend.auto.value,), state))
    file, value = io.BytesIO(), AttnBackend.auto.value
    torch.save([AttnBackend.auto], file)
    file.seek(0)
    assert unpickling._load_object(file) == [AttnBackend.auto]
    file = io.BytesIO()
    torch.save(Altered(), file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError, match=r"sets attributes of AttnBackend\.auto"):
        unpickling._load_object(file)
    assert AttnBackend.auto.value == value


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
