"""BERT through the engine equals a single process, as GPT does in test_update.py: every stage has its mask.

Samples differ in length and in the number of masked tokens, so a stage that took another microbatch's padding, or a
batch that weighed its microbatches otherwise, would show.
"""

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from tests import workers
from tests.pipeline.runtime.stages.megatron import megatron_cases as cases
from tests.pipeline.runtime.stages.megatron.test_update import (
    CLOSE,
    EXACT,
    SPREAD,
    Outcomes,
    Row,
    check,
    marked,
)

BERT = {"bert": True, "batches": (4,) * 6}
TWO_BW = BERT | {"schedule": "2bw"}
SELECTION = {
    "flush": Row(BERT, ((4, 1, 1),), EXACT),
    "2bw": Row(TWO_BW | {"dropout": 0.1, "drains": (2,)}, ((1, 1, 1), (4, 1, 1)), EXACT),
    "2bw tied, clipped": Row(TWO_BW | {"tied": True, "clip": 0.3, "binary_head": False}, ((4, 1, 1),), CLOSE),
    "2bw replicas": Row(TWO_BW | {"clip": 0.3, "dropout": 0.1}, ((2, 1, 2),), CLOSE),
    "2bw tensors": Row(TWO_BW | {"sequence_parallel": True, "tied": True}, ((2, 2, 1),), SPREAD),
    "interleaved": Row(BERT | {"schedule": "interleaved", "v": 2, "tied": True}, ((2, 1, 1),), CLOSE),
    "pipedream": Row(BERT | {"schedule": "pipedream", "batches": (1,) * 12}, ((4, 1, 1),), EXACT),
    "gpipe rotary": Row(BERT | {"schedule": "gpipe", "position": "rope"}, ((2, 1, 1),), EXACT),
    "2bw full recompute": Row(TWO_BW | {"recompute_granularity": "full", "dropout": 0.1}, ((2, 1, 1),), EXACT),
    "2bw bf16": Row(TWO_BW | {"dtype": "bfloat16"}, ((2, 1, 1),), EXACT),
}
FULL = {"2bw tensors", "pipedream", "gpipe rotary", "2bw full recompute", "2bw bf16"}


@pytest.fixture(scope="module")
def selection():
    return Outcomes(SELECTION)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "layout"), marked(SELECTION, full=FULL), ids=str)
def test_training_equals_one_process(selection, name, layout):
    """Losses, norms and both weight versions of the selection are the single process's."""
    check(selection[name, layout], SELECTION[name].allowed)


@pytest.mark.full
def test_evaluations_do_not_depend_on_the_pipeline(selection):
    """Evaluation after a drain has the newest weights and the right masks on every stage: the same sums for p=1, 4."""
    one, four = selection["2bw", (1, 1, 1)][2], selection["2bw", (4, 1, 1)][2]
    assert len(one[0]["evaluations"]) == 1
    assert all(rank["evaluations"] == one[0]["evaluations"] for rank in four)


def test_padding_is_not_attended_to():
    """Other tokens under the padding change nothing for the tokens before it, on any sample."""
    assert workers.run(1, f"{__name__}:padding_case", timeout=100) == [(True, True)]


def padding_case() -> tuple[bool, bool]:
    """(what is not padding is as before, what is padding is not)."""
    case = cases.Case(bert=True, layers=2, micro_batch_size=8)
    batch = cases.microbatch_data(case, 0)
    kept = batch["padding_mask"] == 1
    with cases.parallel(case):
        model = cases.gpt_model(case)
        changed = torch.where(kept, batch["text"], 7)
        before, after = (model(text, batch["padding_mask"], batch["types"])[0] for text in (batch["text"], changed))
    assert 0 < kept.sum() < kept.numel()
    return torch.equal(before[kept], after[kept]), not torch.equal(before[~kept], after[~kept])
