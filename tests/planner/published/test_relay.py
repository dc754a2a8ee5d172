"""L2L's Tables 2 to 5 (benchmarks/l2l_published.json): what the planner says of them, too. See docs/l2l.md."""

import json
from pathlib import Path

import pytest

from megatron.planner.memory.activations import Activations
from megatron.planner.memory.memory import GIB
from megatron.planner.published.entries import load_entries
from megatron.planner.published.prediction import predict
from megatron.planner.time.calibration import START

FILE = Path(__file__).parents[3] / "benchmarks" / "l2l_published.json"


@pytest.fixture(scope="module")
def published() -> dict[str, float]:
    return {each["id"]: each["measured"].get("memory_GB") for each in json.loads(FILE.read_text())["entries"]}


@pytest.fixture(scope="module")
def found() -> dict:
    return {entry.id: predict(entry, START) for entry in load_entries(FILE)}


def gib(prediction) -> float:
    return prediction.estimate.memory[0].total / GIB


def test_memory_over_depth_is_the_papers(found, published):
    """With the stash on the device a layer takes what Table 4 says, within 5%; on the host depth takes nothing; the
    baseline runs at 24 layers and not at 48.
    """
    for fewer, more in ((24, 48), (48, 96)):
        names = f"table4-device-{fewer}", f"table4-device-{more}"
        grown, papers = (gib(found[names[1]]) - gib(found[names[0]])), published[names[1]] - published[names[0]]
        assert grown == pytest.approx(papers, rel=0.05)
    assert len({gib(found[f"table4-host-{layers}"]) for layers in (24, 96, 384)}) == 1
    assert found["table4-baseline-24"].estimate.fits and not found["table4-baseline-48"].estimate.fits


def test_all_differ_from_the_paper_by_the_head_at_most(found, published):
    """A language model has one over its whole vocabulary, and GLUE's classifiers do not. Without it: within
    25%, and 26% of Table 3's four microbatches, whose growth we do not know."""
    relayed = {name: each for name, each in found.items() if each.estimate.configuration.is_hosted}
    assert len(relayed) == 12
    for name, prediction in relayed.items():
        entry = prediction.entry
        activations = Activations(entry.model, entry.software.activation_setting(entry.configuration))
        head = (activations.head + activations.logits_gradient) / GIB
        assert prediction.estimate.verdict.spare_gib + head >= 0
        bound = 0.26 if name == "table3-4" else 0.25
        assert gib(prediction) - head == pytest.approx(published[name], rel=bound), name
