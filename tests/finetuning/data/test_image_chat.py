"""Conversations about an image: the tokens that count, the loss of transformers, and what is refused."""

import json

import pytest
import torch
import transformers

from megatron.finetuning.arguments import parse_args
from megatron.finetuning.samples import read_data
from tests.finetuning import tiny

TASK = "image-text-to-text"
IMAGE = [[[9 * row + column + channel for channel in range(3)] for column in range(8)] for row in range(8)]
ONE = {"image": IMAGE, "prompt": "w1 w2", "completion": "w3 w4"}
TWO = {
    "image": IMAGE,
    "messages": [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": "w3 w4"},
        {"role": "user", "content": [{"type": "text", "text": "w5 "}, {"type": "image"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "w6"}]},
    ],
}


def read(folder, *samples, length=24, argv=()):
    file = folder / "given.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in samples), encoding="utf-8")
    return read_data(tiny.arguments(folder, TASK, "--train_file", file, "--max_seq_length", length, *argv))


# [CLS] and [SEP] are the tokenizer's own around the text, <image> stands for 4 patches, w39 begins an answer.
ALONE = "[CLS] [CLS] <image> <image> <image> <image> w1 w2 [SEP] w39 (w3) (w4) ([SEP]) [SEP]"
LATER = (
    "[CLS] [CLS] w1 [SEP] w39 (w3) (w4) ([SEP]) [CLS] w5 <image> <image> <image> <image> [SEP] w39 (w6) ([SEP]) [SEP]"
)


@pytest.mark.parametrize(("sample", "expected"), [(ONE, ALONE), (TWO, LATER)], ids=["pair", "messages"])
def test_answers_alone_count(tmp_path, sample, expected):
    data = read(tmp_path, sample)
    batch, words = data.training.batch([0], 1), expected.split()
    ids = data.processor.tokenizer.convert_tokens_to_ids([word.strip("()") for word in words])
    labels = [token if word[0] == "(" else -100 for token, word in zip(ids, words, strict=True)]
    rest = 24 - len(ids)
    assert batch["input_ids"].tolist() == [ids + [0] * rest]
    assert batch["attention_mask"].tolist() == [[1] * len(ids) + [0] * rest]
    assert batch["labels"].tolist() == [labels + [-100] * rest]


@pytest.mark.parametrize("argv", [(), ("--train_on_prompt",)], ids=["answers", "all"])
def test_the_loss_is_that_of_transformers_own_inputs(tmp_path, argv):
    """The processor's own call on the rendered conversation, and the mean over the counted labels, one by one."""
    data = read(tmp_path, ONE, argv=argv)
    made = transformers.AutoProcessor.from_pretrained(tiny.model_folder(tmp_path, TASK))
    conversation = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "w1 w2"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "w3 w4"}]},
    ]
    text = made.apply_chat_template(conversation)
    inputs = made(text=[text], images=[torch.tensor(IMAGE, dtype=torch.uint8).numpy()], return_tensors="pt")
    folder = tiny.model_folder(tmp_path, TASK)
    model = transformers.LlavaForConditionalGeneration.from_pretrained(folder).eval()
    batch = data.training.batch([0], 1)
    torch.testing.assert_close(batch["pixel_values"], inputs["pixel_values"])
    ids = inputs["input_ids"][0]
    counted = [10, 11, 12] if not argv else [at for at in range(1, 14) if ids[at] != 44]
    with torch.no_grad():
        chances = model(**inputs).logits[0].log_softmax(-1)
        loss = model(**batch).loss.item()
    expected = sum(-chances[at - 1, ids[at]].item() for at in counted) / len(counted)
    assert loss == pytest.approx(expected, rel=1e-5)


def test_long_conversations_are_cut_behind_their_image(tmp_path):
    data = read(tmp_path, ONE, length=12)
    assert data.training.batch([0], 1)["labels"][0, 10:].tolist() == [4 + 3, 4 + 4]
    assert any("1 conversation of 1 cut to --max_seq_length 12" in note for note in data.notes)
    with pytest.raises(ValueError, match="sample 2: its image ends at token 14, which --max_seq_length 13 cuts off"):
        read(tmp_path, {"image": IMAGE, **{"messages": TWO["messages"][:2]}}, TWO, length=13)


@pytest.mark.parametrize(
    ("sample", "sentence"),
    [
        ({"prompt": "w1", "completion": "w2"}, r"has no column for the image \(looked for image, "),
        ({**ONE, "image": "none.png"}, r"given\.jsonl, sample 1: the image .*none\.png cannot be read"),
        ({**TWO, "messages": [{"role": "user", "content": [{"type": "image"}] * 2}, TWO["messages"][1]]},
         r"sample 1: the chat template writes 2 images \('<image>'\), and a sample has one"),
        ({**TWO, "messages": [{"role": "user", "content": [{"type": "video"}]}]},
         r"sample 1, message 1 of 'messages' has the part \{'type': 'video'\}, and .* is wanted; mend it"),
        ({**TWO, "messages": TWO["messages"][1:2]}, r"sample 1: no message is the user's, so the image has no place"),
    ],
)  # fmt: skip
def test_samples_that_are_refused(tmp_path, sample, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(tmp_path, sample)


def test_a_folder_without_its_processor_is_refused(tmp_path):
    for path in tiny.model_folder(tmp_path, TASK).glob("*processor*"):
        path.unlink()
    with pytest.raises(ValueError, match="has no processor with its image processor and tokenizer and image token"):
        read(tmp_path, ONE)


# Gemma 3's processor puts lines around the image, of which the first ones join the line's end that stood there.
GEMMA3 = "[CLS] <turn> user \n\n\n <boi> I I I I <eoi> \n\n w1 w2 <end> \n <turn> model \n (w3) (w4) (<end>) (\n)"
PALIGEMMA = "I I I I [CLS] w1 w2 \n (w3) (w4) ([SEP])"
"""I: an image's token."""


@pytest.mark.parametrize(("kind", "expected"), [("gemma3", GEMMA3), ("paligemma", PALIGEMMA)])
def test_tokens_have_their_types(tmp_path, kind, expected):
    """Those of Gemma 3's image have the type 1, and those of PaliGemma's answer; padding has 0."""
    model = ("--model_name_or_path", tiny.typed_folder(tmp_path, kind))
    data, words = read(tmp_path, ONE, argv=model), [word.strip("()") for word in expected.split(" ")]
    tokenizer = data.processor.tokenizer
    ids = tokenizer.convert_tokens_to_ids([word.replace("I", tokenizer.image_token) for word in words])
    counts, is_image = [word[0] == "(" for word in expected.split(" ")], [word == "I" for word in words]
    labels = [token if count else -100 for token, count in zip(ids, counts, strict=True)]
    rest, batch = 24 - len(ids), data.training.batch([0], 1)
    assert batch["input_ids"].tolist() == [ids + [0] * rest]
    assert batch["labels"].tolist() == [labels + [-100] * rest]
    types = [int(each) for each in (is_image if kind == "gemma3" else counts)]
    assert batch["token_type_ids"].tolist() == [types + [0] * rest]
    assert batch["attention_mask"].tolist() == [[1] * len(ids) + [0] * rest]
    short = read(tmp_path, ONE, length=len(ids) - 2, argv=model).training.batch([0], 1)
    for name in ("input_ids", "token_type_ids", "labels"):
        assert torch.equal(short[name], batch[name][:, : len(ids) - 2]), name


@pytest.mark.parametrize("kind", ["gemma3", "paligemma"])
def test_the_loss_is_that_of_transformers_own_inputs_with_types(tmp_path, kind):
    """The processor's own call, unpadded, on a conversation, or on a prompt and its suffix; and the types matter."""
    folder = tiny.typed_folder(tmp_path, kind)
    batch = read(tmp_path, ONE, argv=("--model_name_or_path", folder)).training.batch([0], 1)
    made = transformers.AutoProcessor.from_pretrained(folder)
    text = "<image>w1 w2" if kind == "paligemma" else made.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "w1 w2"}]},
         {"role": "assistant", "content": [{"type": "text", "text": "w3 w4"}]}]
    )  # fmt: skip
    options = {"suffix": ["w3 w4"]} if kind == "paligemma" else {"add_special_tokens": False}
    inputs = made(text=[text], images=[torch.tensor(IMAGE, dtype=torch.uint8).numpy()], return_tensors="pt", **options)
    labels, ids = inputs.pop("labels", None), inputs["input_ids"][0]
    counted = range(18, 22) if labels is None else (labels[0] != -100).nonzero()[:, 0].tolist()
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    with torch.no_grad():
        chances = model(**inputs).logits[0].log_softmax(-1)
        loss = model(**batch).loss.item()
        other = model(**{**batch, "token_type_ids": (kind == "paligemma") + 0 * batch["token_type_ids"]}).loss.item()
    expected = sum(-chances[at - 1, ids[at]].item() for at in counted) / len(counted)
    assert loss == pytest.approx(expected, rel=1e-5) and abs(other - loss) > 1e-4 * loss


@pytest.mark.parametrize(
    ("sample", "argv", "sentence"),
    [
        (ONE, ["--train_on_prompt"], "--train_on_prompt is for models of conversations, and PaliGemmaProcessor takes"),
        (TWO, [], "PaliGemmaProcessor takes one message of the user's and an answer, and the conversation has user, a"),
        ({**ONE, "prompt": "w1 <image> w2"}, [], "the prompt has 2 images and the answer 0, and one in the prompt is"),
    ],
)
def test_what_a_prompt_with_a_suffix_cannot_be_is_refused(tmp_path, sample, argv, sentence):
    model = ("--model_name_or_path", tiny.typed_folder(tmp_path, "paligemma"))
    with pytest.raises(ValueError, match=sentence):
        read(tmp_path, sample, argv=[*model, *argv])


def test_a_processor_without_the_types_that_the_model_attends_by_is_refused(tmp_path):
    transformers.Gemma3Config().save_pretrained(tiny.model_folder(tmp_path, TASK))
    with pytest.raises(ValueError, match="Gemma3ForConditionalGeneration attend by their token_type_ids, and its proc"):
        read(tmp_path, ONE)


def test_packing_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"--packing puts several samples .* --task is image-text-to-text; leave it out"
    ):
        parse_args(tiny.command(tmp_path, TASK, "--packing"))


def test_marked_answers_of_a_template_that_writes_the_first_token(tmp_path):
    """The tokenizer adds no second one then, as in transformers; the template is a file that marks answers."""
    config = tiny.model_folder(tmp_path, TASK) / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "bos_token": "[CLS]"}))
    template = tmp_path / "marks.jinja"
    template.write_text(
        "[CLS] {% for message in messages %}{% for part in message.content %}{% if part.type == 'image' %}<image> "
        "{% elif message.role == 'user' %}{{ part.text }} {% else %}{% generation %}{{ part.text }}{% endgeneration %}"
        "{% endif %}{% endfor %}{% endfor %}"
    )
    batch = read(tmp_path, ONE, argv=("--chat_template", template)).training.batch([0], 1)
    assert batch["input_ids"][0, :9].tolist() == [2, 44, 44, 44, 44, 5, 6, 7, 8]
    assert batch["labels"][0].tolist() == [-100] * 7 + [7, 8] + [-100] * 15
