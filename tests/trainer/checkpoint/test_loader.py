"""The common file is read without executing what it says, whichever Python wrote it."""

import pytest
import torch

from megatron.core.transformer.enums import AttnBackend
from megatron.pipeline.runtime.failure.errors import CheckpointError
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
