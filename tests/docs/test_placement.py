"""docs/placement.md: its commands run, and what it quotes is what is printed."""

import re
import shlex
from pathlib import Path

from megatron.commands import rank_map
from megatron.pipeline.placement.cost import describe_crossing, describe_need, pair_transfers
from megatron.pipeline.placement.mapping import Degrees, pair_adjacent
from tests.docs.test_schedules import load
from tests.pipeline.placement.examples import gpt3_96b, machine

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "placement.md").read_text()


def test_commands_run(tmp_path, monkeypatch):
    """Every command of the page succeeds, from the repository, and writes what it names."""
    monkeypatch.chdir(ROOT)
    commands = re.findall(r"^\$ python tools/rank_map\.py (.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        argv = [str(tmp_path / word) if word in ("map.png", "map.json") else word for word in shlex.split(command)]
        assert rank_map.main(argv) == 0
    assert (tmp_path / "map.png").exists() and (tmp_path / "map.json").exists()


def test_quoted_sentences():
    """Tensor parallelism that fills the node: crossing, need and verdict, word by word."""
    degrees = Degrees(tensor=8, pipeline=4, data=1)
    moved = gpt3_96b(tensor=8, pipeline=4, micro_batch_size=2).moved_bytes
    mapping, topology = pair_adjacent(degrees), machine(8, 8, 8, 8)
    transfers = pair_transfers(mapping, degrees, topology, moved, [0])
    need = describe_need(transfers, forward_seconds=0.14337)
    assert f"```\n{describe_crossing(mapping, degrees, [8] * 4, [0])}\n{need}\n```" in PAGE


def test_figures_are_shown(monkeypatch):
    """Figures 5a, 5b and 6: the page shows what docs/make_images.py draws."""
    shown = re.findall(r"!\[[^]]+\]\(images/(\S+)\)", PAGE)
    images, drawn = load(ROOT / "docs" / "make_images.py"), []
    monkeypatch.setattr(images, "draw_placement", lambda report, path: drawn.append(path.name))
    images.main(["placement"])
    assert drawn == shown
    assert shown == [f"placement_figure_{figure}.png" for figure in ("5a", "5b", "6")]
    assert all((ROOT / "docs" / "images" / name).stat().st_size > 10_000 for name in shown)
