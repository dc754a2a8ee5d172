"""The page on the library: what it shows runs, block after block."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_page_runs(tmp_path, monkeypatch, capsys):
    """Its blocks, in one process and one after the other; they print what they say, and a picture is there."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = BLOCK.findall((ROOT / "docs/library.md").read_text(encoding="utf-8"))
    assert len(blocks) == 9
    for block in blocks[:-1]:
        exec(compile(block, "docs/library.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[:3]] == ["0", "1", "2"]
    assert "(0, 1)" in printed and printed[-1] == "1"
    assert (tmp_path / "timeline.png").stat().st_size
    exec(compile(blocks[-1], "docs/library.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("CheckReport(num_ranks=4") and "3RECV_F0,3F0@0," in "\n".join(printed)


def test_the_readme_shows_the_library(capsys):
    """The README's example of `Pipeline` trains in one process as it stands."""
    blocks = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    (block,) = (block for block in blocks if "import Pipeline" in block)
    assert len(block.splitlines()) <= 12
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()
