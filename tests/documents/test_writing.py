"""Files that are written whole or not at all."""

import os
import stat
from unittest import mock

import pytest

from megatron.documents.files import write_whole


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_permissions_are_those_of_any_new_file(tmp_path, mask, mode):
    """Less the umask, which is of all threads of the process and stays as it is meanwhile."""
    path, before = tmp_path / "a.json", os.umask(mask)
    try:
        for content in "old", b"new":
            with mock.patch.object(os, "umask", side_effect=AssertionError("other threads make files, too")):
                write_whole(path, content)
        assert stat.S_IMODE(path.stat().st_mode) == mode
    finally:
        os.umask(before)
    assert path.read_text() == "new" and [each.name for each in tmp_path.iterdir()] == ["a.json"]
