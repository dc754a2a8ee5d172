"""What a search's outputs say of strategies without a pipeline: other systems', compared and named."""

import json
import re
from html import unescape

from megatron.commands import grid_search as tool  # noqa: F401  of the fixture `run`
from tests.commands.search_argv import CLUSTER, GPT, QUICK

SUBCOMMAND = ("search",)


def test_every_output_says_it(run, tmp_path):
    """The table, the JSON object, the page and the head of the script; the script starts what this project trains."""
    status, out, _ = run(*CLUSTER, *GPT, *QUICK, "--output", tmp_path)
    assert status == 0
    said = next(line for line in out.splitlines() if line.startswith("note: without a pipeline: "))
    text = said.removeprefix("note: ")
    assert "this project cannot" in text and "best.sh starts the best that it can train" in text
    page = re.sub(r"<[^>]*>", "", unescape((tmp_path / "report.html").read_text()))
    assert text[1:] in page
    script = (tmp_path / "best.sh").read_text()
    head = " ".join(line.removeprefix("#").strip() for line in script.splitlines() if line.startswith("#"))
    assert f"Note: {text}." in head
    assert not re.search(r"--\S*fsdp|--zero", script)
    content = json.loads(run(*CLUSTER, *GPT, *QUICK, "--json")[1])
    assert content["notes"][-1] == text
    found = content["without_pipeline"]
    assert found["trained_here"] is False and found["strategy"] == "fsdp" and found["fits"] is True
    assert found["tensor"] * found["data"] == 8
    assert all("zero_stage" not in each for each in content["best"])


def test_it_is_said_where_nothing_of_ours_fits(run):
    """One sentence still: what the nearest misses, and what others would reach."""
    huge = ["--num-layers", "4", "--hidden-size", "81920", "--num-attention-heads", "64", "--global-batch-size", "8"]
    rest = ["--seq-length", "128", "--vocab-size", "1024", "--fp16", "--schedules", "flush"]
    status, _, err = run(*CLUSTER, *huge, *rest)
    assert status == 1 and "can run" in err and "without a pipeline nothing fits" in err
