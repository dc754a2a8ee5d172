"""Where answers stand, windows of long contexts, and SQuAD's scores."""

import json

import pytest
import torch

from megatron.finetuning.data.question_answering import exact_match, f1
from megatron.finetuning.samples import read_data
from tests.finetuning import tiny

TASK = "question-answering"


def rows_of(folder, samples, *words):
    path = folder / "qa.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in samples))
    return read_data(tiny.namespace(tiny.arguments(folder, TASK, *words), train_file=str(path))).training


def sample(context: str, answer: str) -> dict:
    start = context.find(answer) if answer else None
    answers = {"text": [answer], "answer_start": [start]} if answer else {"text": [], "answer_start": []}
    return {"question": "w0 w0", "context": context, "answers": answers}


def test_positions(tmp_path):
    rows = rows_of(tmp_path, [sample("w1 w2 w3 w4", "w2 w3"), sample("w5 w6", "")])
    batch = rows.batch([0, 1], 2)
    assert batch["input_ids"][0].tolist() == [2, 4, 4, 3, 5, 6, 7, 8, 3, 0, 0, 0]
    assert batch["start_positions"].tolist() == [5, 0] and batch["end_positions"].tolist() == [6, 0]


def test_windows(tmp_path):
    """A context of 15 tokens in sequences of 12, of which question and separators take 5, shared by 2."""
    context = " ".join(f"w{number}" for number in range(1, 16))
    rows = rows_of(tmp_path, [sample(context, "w14 w15")])
    batch = rows.batch(range(len(rows)), len(rows))
    assert len(rows) == 3
    assert batch["input_ids"][:, 4].tolist() == [5, 10, 15]  # windows begin 5 tokens apart
    assert batch["start_positions"].tolist() == [0, 0, 7] and batch["end_positions"].tolist() == [0, 0, 8]
    starts, ends = torch.zeros(2, 3, 12)
    starts[2, 7], ends[2, 8] = 5.0, 5.0
    assert rows.metrics({"start_logits": starts, "end_logits": ends}, 0.0) == {"f1": 1.0, "exact_match": 1.0}
    starts[0, 5], ends[0, 5] = 9.0, 9.0  # another window is surer of w2
    assert rows.metrics({"start_logits": starts, "end_logits": ends}, 0.0) == {"f1": 0.0, "exact_match": 0.0}
    ends[0, 5], ends[0, 4] = 0.0, 9.0  # what ends before it begins is no answer
    assert rows.metrics({"start_logits": starts, "end_logits": ends}, 0.0)["f1"] in (0.0, 1.0)


def test_windows_without_the_answer_do_not_outvote_it(tmp_path):
    """They are taught to point at their first token; so one that is sure of that says nothing of the other windows."""
    context = " ".join(f"w{number}" for number in range(1, 16))
    starts, ends = torch.zeros(2, 3, 12)
    starts[:2, 0] = ends[:2, 0] = 9.0
    starts[2, 7], ends[2, 8] = 5.0, 5.0
    for others, f1_of_all in (([], 1.0), ([sample("w5 w6", "")], 1.0)):
        rows = rows_of(tmp_path, [sample(context, "w14 w15"), *others])
        more = torch.zeros(len(rows) - 3, 12)
        more[:, 0] = 1.0
        found = {"start_logits": torch.cat([starts, more]), "end_logits": torch.cat([ends, more])}
        assert rows.metrics(found, 0.0) == {"f1": f1_of_all, "exact_match": 1.0}


def test_a_question_that_leaves_no_room(tmp_path):
    """Three special tokens and seven of the question leave two, as many as windows share."""
    long = {**sample("w1 w2 w3", "w2"), "question": "w0 " * 7}
    with pytest.raises(ValueError, match="sample 1: its question of 7 tokens leaves 2 of --max_seq_length 12"):
        rows_of(tmp_path, [long])


def test_no_answer_is_an_answer(tmp_path):
    rows = rows_of(tmp_path, [sample("w5 w6", "")])
    starts, ends = torch.zeros(2, 1, 12)
    starts[0, 0] = ends[0, 0] = 1.0
    assert rows.metrics({"start_logits": starts, "end_logits": ends}, 0.0) == {"f1": 1.0, "exact_match": 1.0}


def test_scores():
    assert exact_match("The  Cat!", ["a dog", "cat"]) == 1.0 and exact_match("cats", ["cat"]) == 0.0
    assert f1("the black cat", ["black dog", "a cat"]) == pytest.approx(2 / 3)
    assert f1("", []) == exact_match("", []) == 1.0 and f1("cat", []) == 0.0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"answers": {"text": ["w2"], "answer_start": [1]}}, "'w2' does not stand at character 1 of its context"),
        ({"answers": {"text": ["w2"], "answer_start": []}}, "are no lists of one length"),
        ({"answers": {"text": "w2", "answer_start": 3}}, "are no lists of one length"),
        ({"answers": {"text": ["w2"], "answer_start": ["3"]}}, "the answer 'w2' at '3' is no text at a whole number"),
        ({"answers": [1]}, r"'answers' is \[1\], and a text or"),
        ({"answers": {"text": []}}, "'answers' has the fields 'text', and a text or"),
        ({"context": None}, "'context' is None, and a text is wanted"),
    ],
)
def test_sentences(tmp_path, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        rows_of(tmp_path, [{**sample("w1 w2", "w2"), **change}])


def test_windows_need_something_of_their_own(tmp_path):
    with pytest.raises(ValueError, match="--doc_stride 6 makes windows of --max_seq_length 12 share half"):
        rows_of(tmp_path, [sample("w1 w2", "w2")], "--doc_stride", 6)
