"""Conversations: which tokens count, by either way to find them; forms of files; what is cut, left out and refused."""

import json
import shutil

import pytest
import torch

from megatron.finetuning.samples import read_data
from tests.finetuning import tiny

MARKED = tiny.TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}",
)
"""The same text as tiny.TEMPLATE, which marks answers without their ends."""
FORGETS = "{{ messages | length }} " + tiny.TEMPLATE
"""A template that begins otherwise for each number of messages."""
THINKS = tiny.TEMPLATE.replace(
    "{{ message.content }}", "{% if loop.last and message.role != 'user' %}w30 {% endif %}{{ message.content }}"
)
"""A template that writes something into the last message if that is an answer, as Qwen3's does."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


def turns(*texts: str) -> list[dict]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def data_of(folder, samples, *words, template=None):
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in samples))
    if template is not None:
        (folder / "template.jinja").write_text(template)
        words += ("--chat_template", folder / "template.jinja")
    return read_data(tiny.arguments(folder, "chat", "--train_file", path, *words))


def ids(text: str) -> list[int]:
    return tiny.tokenizer()(text, add_special_tokens=False)["input_ids"]


def counted_tokens(rows) -> list[list[int]]:
    labels = rows.batch(range(len(rows)), len(rows))["labels"]
    return [row[row >= 0].tolist() for row in labels]


@pytest.mark.parametrize("template", [tiny.TEMPLATE, MARKED, None], ids=["compared", "marked", "own"])
def test_the_answers_count(folder, template):
    """Each answer with its end, or what the template marks, in rows of its whole text; the tokenizer keeps it."""
    data = data_of(folder, [{"messages": turns("w1 w2", "w3", "w4", "w5 w6")}], template=template)
    batch = data.training.batch([0], 1)
    text = ids("[CLS] w1 w2 [SEP] w39 w3 [SEP] [CLS] w4 [SEP] w39 w5 w6 [SEP]")
    assert len(text) == 14 and batch["input_ids"].tolist() == [text[:12]]
    assert counted_tokens(data.training) == [ids("w3 w5" if template == MARKED else "w3 [SEP] w5")]
    assert batch["labels"][batch["labels"] >= 0].tolist() == batch["input_ids"][batch["labels"] >= 0].tolist()
    assert data.notes == (f"{folder / 'chats.jsonl'}: 1 conversation of 1 cut to --max_seq_length 12",)
    assert data.processor.chat_template == template or template is None


def test_all_tokens_count_with_train_on_prompt(folder):
    data = data_of(folder, [{"messages": turns("w1", "w2")}], "--train_on_prompt", template=FORGETS)
    assert counted_tokens(data.training) == [ids("2 [CLS] w1 [SEP] w39 w2 [SEP]")[1:]]


@pytest.mark.parametrize(
    "sample",
    [
        {"conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]},
        {"prompt": "w1", "completion": "w2"},
        {"prompt": turns("w1"), "completion": [{"role": "assistant", "content": "w2"}]},
        {"messages": [{**each, "tool_calls": None} for each in turns("w1", "w2")], "prompt": "w7"},
    ],
)
def test_forms_of_conversations(folder, sample):
    """ShareGPT's, prompts with completions, and messages with empty fields, as parquet has them, are one."""
    rows = data_of(folder, [sample]).training
    expected = data_of(folder, [{"messages": turns("w1", "w2")}]).training
    for name, tensor in rows.batch([0], 1).items():
        assert torch.equal(tensor, expected.batch([0], 1)[name])
    assert counted_tokens(rows) == [ids("w2 [SEP]")]


def test_what_has_no_answer_is_left_out(folder):
    """Without an answer, and with one behind the cut; a conversation that begins with one has nothing to answer."""
    long, begins = turns("w1 " * 12, "w2"), turns("w1", "w2", "w3")[1:]
    samples = [{"messages": each} for each in (turns("w1"), long, begins, turns("w1", "w2"))]
    data = data_of(folder, samples)
    assert len(data.training) == 1 and counted_tokens(data.training) == [ids("w2 [SEP]")]
    assert [note.partition(": ")[2] for note in data.notes] == [
        "1 conversation of 4 cut to --max_seq_length 12",
        "3 conversations of 4 left out, without an answer in what is left",
    ]
    with pytest.raises(ValueError, match=r"chats.jsonl: no conversation has an answer within --max_seq_length 12;"):
        data_of(folder, samples[:2])


def test_packed_conversations(folder):
    """Positions begin anew with each, there is no mask; accuracy and the count of terms are those of single rows."""
    samples = [{"messages": turns("w1", "w2")}, {"messages": turns("w3 w4 w5", "w6")}, {"messages": turns("w7", "w8")}]
    alone, packed = (data_of(folder, samples, *words).training for words in ((), ("--packing",)))
    assert (len(alone), len(packed)) == (3, 2) and packed.notes == ("--packing: 3 sequences in 2 rows",)
    batch = packed.batch([0, 1], 2)
    assert list(batch) == ["input_ids", "position_ids", "labels"]
    assert batch["position_ids"].tolist() == [[*range(8), *range(4)], [*range(6), *range(6)]]
    assert packed.num_terms([0, 1]) == alone.num_terms([0, 1, 2]) == 6
    right = torch.full_like(batch["labels"], 1)
    right[:, :-1] = batch["labels"][:, 1:]
    assert packed.metrics({"logits": right}, 0.0) == {"perplexity": 1.0, "token_accuracy": 1.0}
    right[0, 5] += 1  # predicts w6, at place 6
    assert packed.metrics({"logits": right}, 0.0)["token_accuracy"] == pytest.approx(5 / 6)


@pytest.mark.parametrize(
    ("sample", "template", "sentence"),
    [
        ({"messages": turns("w1", "w2", "w3", "w4")}, FORGETS, r"sample 1: the chat template writes what stands before "
         r"message 2 or its answer in another way .* give a --chat_template that marks answers with \{% gener"),
        ({"messages": turns("w1", "w2", "w3", "w4")}, THINKS, r"stands before message 2 or its answer in another way"),
        ({"messages": turns("w1", "w2")}, "{{ raise_exception('roles') }}",
         r"sample 1: the chat template does not take the conversation \(TemplateError: roles\); mend it"),
        ({"messages": "w1"}, None, r"sample 1: 'messages' is 'w1', and a list of messages is wanted"),
        ({"messages": [{"role": "user"}]}, None, r"sample 1, message 1 of 'messages' is .*\"content\".* is wanted"),
        ({"text": "w1"}, None, r"has no column for the messages \(looked for messages, .*name one with --messages_col"),
        ({"prompt": "w1"}, None, r"has no column for the target \(looked for completion\)"),
    ],
)  # fmt: skip
def test_refusals(folder, sample, template, sentence):
    with pytest.raises(ValueError, match=sentence):
        data_of(folder, [sample], template=template)


def test_a_tokenizer_without_a_template(folder, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny.model_folder(folder, "chat"), model)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(model)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"has no chat template; name a file with one with --chat_template"):
        data_of(folder, [{"messages": turns("w1", "w2")}], "--model_name_or_path", model)


def test_prompts_of_generations(folder):
    """What stands before the last answer; a conversation that ends in a question has the answer before; one without
    any is left out and counted. A base model is asked with a template that only joins prompt and answer."""
    samples = [turns("w1", "w2", "w3", "w4"), turns("w1", "w2", "w3"), turns("w1")]
    path = folder / "asked.jsonl"
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in samples))
    words = ["--validation_file", path, "--train_file", path, "--predict_with_generate"]
    data = read_data(tiny.arguments(folder, "chat", *words))
    assert list(data.prompts.references) == ["w4", "w2"]
    assert list(data.prompts.ids) == [ids("[CLS] w1 [SEP] w39 w2 [SEP] [CLS] w3 [SEP] w39"), ids("[CLS] w1 [SEP] w39")]
    assert f"{path}: 1 conversation without an answer that is a text: none is generated" in data.notes
    path.write_text(json.dumps({"prompt": "w1 w2 ", "completion": "w3"}) + "\n")
    joins = folder / "joins.jinja"
    joins.write_text("{% for each in messages %}{{ each.content }}{% endfor %}")
    data = read_data(tiny.arguments(folder, "chat", *words, "--chat_template", joins))
    assert list(data.prompts.ids) == [ids("w1 w2")] and counted_tokens(data.training) == [ids("w3")]
    joins.write_text("{% if not add_generation_prompt %}w1 w2 {% endif %}")
    with pytest.raises(ValueError, match="writes no token before the answer 'w3', so there is nothing to generate"):
        read_data(tiny.arguments(folder, "chat", *words, "--chat_template", joins, "--train_on_prompt"))
