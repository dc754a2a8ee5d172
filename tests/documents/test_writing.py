"""Files that are written whole or not at all."""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest

from megatron.documents.files import write_whole
from tests.full_disk import largest_file


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


def test_links_stay_and_what_is_no_regular_file_is_written_as_it_is(tmp_path):
    """A rename would make a file of /dev/null, or of a pipe."""
    (tmp_path / "old.json").write_text("old")
    os.mkfifo(tmp_path / "pipe")
    links = {name: tmp_path / f"link to {name.name}" for name in (tmp_path / "old.json", tmp_path / "new.json")}
    for name, link in (links | {Path("/dev/null"): tmp_path / "nothing"}).items():
        link.symlink_to(name)
    for link in links.values():
        write_whole(link, "new")
        assert link.is_symlink() and link.read_text() == "new"
    write_whole(tmp_path / "nothing", "new")
    assert (tmp_path / "nothing").is_symlink() and Path("/dev/null").is_char_device()
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()), daemon=True)
    reader.start()
    write_whole(tmp_path / "pipe", "new")
    reader.join(timeout=20)
    assert read == ["new"] and (tmp_path / "pipe").is_fifo()


SCRIPT = """
import sys
from pathlib import Path
from megatron.documents.files import write_whole
print("before", flush=True)
write_whole(Path(sys.argv[1]), "content\\n")
print("after", flush=True)
"""


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
def test_what_was_printed_to_an_open_file_stays(tmp_path, name):
    """And what is printed next does not overwrite the content."""
    (tmp_path / "link").symlink_to("/dev/stdout")
    with open(tmp_path / "printed", "w") as output:
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / name)]
        subprocess.run(command, stdout=output, check=True, timeout=60)
    assert (tmp_path / "printed").read_text() == "before\ncontent\nafter\n"


def test_an_error_names_the_file_which_is_not_there(tmp_path):
    """The one that writing raises names none."""
    path = tmp_path / "a.json"
    with largest_file(8), pytest.raises(OSError, match="File too large") as error:
        write_whole(path, "more than eight bytes")
    assert error.value.filename == str(path) and not list(tmp_path.iterdir())
