"""The common file is read without executing what it says, whichever Python wrote it."""

import io

import pytest
import torch
import torch.distributed.checkpoint

from megatron.core.transformer.enums import AttnBackend
from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.pipeline.start_up.core_version import TRAINED
from megatron.trainer.checkpoint import loader
from megatron.trainer.checkpoint.directory import CheckpointLocation
from megatron.trainer.checkpoint.loader import COMMON_FILE, read_common_state


class Reduced:
    """Pickled as a call of `getattr`, as Python 3.11.2 pickles the members of enumerations."""

    def __init__(self, *arguments):
        self._arguments = arguments

    def __reduce__(self):
        return getattr, self._arguments


def written(tmp_path, value) -> CheckpointLocation:
    torch.save({"value": value}, tmp_path / COMMON_FILE)
    return CheckpointLocation(root=tmp_path, path=tmp_path, iteration=1)


def test_members_of_enumerations_of_every_python(tmp_path):
    """A member is read, by value and by name."""
    for value in (AttnBackend.auto, Reduced(AttnBackend, "auto")):
        assert read_common_state(written(tmp_path, value))["value"] is AttnBackend.auto


@pytest.mark.parametrize(
    "arguments", [(AttnBackend, "mro"), (AttnBackend, "__class__"), (dict, "get"), ("text", "upper")]
)
def test_nothing_else_is_looked_up(tmp_path, arguments):
    """A file that wants any other attribute is refused."""
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_common_state(written(tmp_path, Reduced(*arguments)))


@pytest.mark.parametrize("damage", [None, "cut", "missing"])
def test_the_common_state_of_core_0_19_lies_beside_the_tensors(tmp_path, monkeypatch, damage):
    """It is read there; damage, and an older megatron.core, which reads no such checkpoint, are told by name."""
    held = io.BytesIO()
    torch.save([{"iteration": 7}], held)
    torch.distributed.checkpoint.save({"common_state/shard_0_1": held}, checkpoint_id=tmp_path, no_dist=True)
    location = CheckpointLocation(root=tmp_path, path=tmp_path, iteration=7)
    monkeypatch.setattr(loader, "installed_core", lambda: TRAINED[0, 16])
    with pytest.raises(CheckpointError, match=r"saved with megatron.core 0.19 or later.*; use 0.19 or later"):
        read_common_state(location)
    monkeypatch.setattr(loader, "installed_core", lambda: TRAINED[0, 19])
    [file] = tmp_path.glob("*.distcp")
    if damage is None:
        assert read_common_state(location) == {"iteration": 7}
        return
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:100])
    else:
        file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_common_state(location)
