"""Files that cannot be written are refused before the work; an error in writing costs no earlier file."""

import pytest

from megatron.commands import rank_map, schedule
from megatron.documents.command_line import require_file
from tests.commands.in_process import ROOT, runner
from tests.full_disk import largest_file

RANKS = f"--rank-topology {ROOT / 'examples' / 'topology.yaml'} --pipeline-model-parallel-size 4"


def test_files_that_cannot_be_written(tmp_path):
    """A folder, a folder that is a file, and one that is not there and cannot be made; a new folder can."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "x.png", tmp_path / "file" / "new" / "x.png"):
        with pytest.raises(ValueError, match=f"^--to {path} cannot be written; name a file in a folder of yours$"):
            require_file(path, "--to")
    require_file(tmp_path / "new" / "x.png")
    require_file(tmp_path / "file")


@pytest.mark.parametrize(
    ("tool", "work", "argv"),
    [
        (schedule, "simulate", "draw --schedule flush --output"),
        (rank_map, "_mapping", f"{RANKS} --output"),
        (rank_map, "_mapping", f"{RANKS} --write-mapping"),
    ],
)
def test_nothing_is_computed_before(tool, work, argv, capsys, monkeypatch, tmp_path):
    """The sentence names the flag."""
    monkeypatch.setattr(tool, work, lambda *arguments, **options: pytest.fail("it has worked"))
    status, _, err = runner(tool, capsys)(*argv.split(), tmp_path)
    assert status == 1 and f"{argv.split()[-1]} {tmp_path} cannot be written; name a file" in err


@pytest.mark.parametrize(
    ("tool", "argv", "name"),
    [
        (schedule, "show --schedule flush --stages 2 --microbatches 2 --csv", "a.csv"),
        (schedule, "simulate --schedule flush --stages 2 --microbatches 2 --json", "a.json"),
        (schedule, "without --schedule flush --stages 2 --microbatches 2 --replicas 2 --json", "a.json"),
        (schedule, "draw --schedule flush --stages 2 --microbatches 2 --output", "a.png"),
        (rank_map, f"{RANKS} --write-mapping", "a.json"),
    ],
)
def test_a_disk_that_is_full_costs_no_earlier_file(tool, argv, name, capsys, tmp_path):
    """The error names the file, which holds what it held before."""
    path = tmp_path / name
    path.write_text("earlier")
    with largest_file(8):
        status, _, err = runner(tool, capsys)(*argv.split(), path)
    assert status == 2 and err.splitlines()[-1] == f"error: {path}: File too large"
    assert path.read_text() == "earlier" and [each.name for each in tmp_path.iterdir()] == [name]
