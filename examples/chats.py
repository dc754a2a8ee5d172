"""A small chat model and conversations to fine-tune it on, made here; and a question to such a model.

    python examples/chats.py --folder DATA
    python examples/chats.py --chats OWN.jsonl --answer "The answer is {}."
    python examples/chats.py --model DATA/model --ask "What is the day after Monday?"

`DATA/train.jsonl` has 450 conversations and `DATA/validation.jsonl` 50 others: of two to four questions after days,
months and sums. `DATA/model` is a Llama of 11 million parameters that has learned nothing, with a tokenizer whose chat
template marks the answers. `OWN.jsonl` has 500 conversations with the same questions, answered in another form.
"""

import argparse
import calendar
import json
import random
import sys
from pathlib import Path

import torch

_SERIES = {"day": calendar.day_name[:], "month": calendar.month_name[1:]}
_HEADS = 5
_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{% else %}\
{{ message.content }}<|im_end|>{% endif %}
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where data and model go")
    parser.add_argument("--chats", type=Path, help="a file of conversations alone")
    parser.add_argument("--answer", default="{}", help="the form of its answers (default: {})")
    parser.add_argument("--layers", type=int, default=8, help="of the model (default: 8)")
    parser.add_argument("--hidden", type=int, default=320, help="its width (default: 320)")
    parser.add_argument("--model", type=Path, help="the folder of a model to ask")
    parser.add_argument("--ask", help="a question to it")
    options = parser.parse_args()
    wanted = sum(each is not None for each in (options.folder, options.chats, options.model))
    if wanted != 1 or (options.model is None) != (options.ask is None):
        parser.error("give --folder, or --chats, or --model and --ask")
    if options.layers < 1 or options.hidden < 1 or options.hidden % (2 * _HEADS):
        parser.error(
            f"--layers {options.layers} --hidden {options.hidden} make no model of {_HEADS} heads of an even width; "
            f"give at least one layer, and a multiple of {2 * _HEADS}"
        )
    if options.ask is not None:
        print(answer(options.model, options.ask))
        return 0
    chats = conversations(500, options.answer)
    if options.chats is not None:
        write(options.chats, chats)
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)
    write(options.folder / "train.jsonl", chats[:450])
    write(options.folder / "validation.jsonl", chats[450:])
    make_model(chats, options)
    return 0


def write(file: Path, chats: list[list[dict[str, str]]]) -> None:
    """Write a conversation a line."""
    lines = [json.dumps({"messages": messages}) + "\n" for messages in chats]
    file.write_text("".join(lines), encoding="utf-8")


def conversations(count: int, form: str) -> list[list[dict[str, str]]]:
    """Lists of messages, the same every time; `form` is what an answer says, with {} in the place of what was asked."""
    asked = [
        (f"What is the {what} {place} {series[at]}?", series[(at + step) % len(series)])
        for what, series in _SERIES.items()
        for at in range(len(series))
        for place, step in (("after", 1), ("before", -1))
    ] + [(f"What is {one} plus {other}?", str(one + other)) for one in range(5) for other in range(5)]
    choose = random.Random(0)
    return [
        [
            {"role": role, "content": text}
            for pair in choose.sample(asked, choose.randint(2, 4))
            for role, text in zip(("user", "assistant"), (pair[0], form.replace("{}", pair[1])), strict=True)
        ]
        for _ in range(count)
    ]


def make_model(chats: list[list[dict[str, str]]], options: argparse.Namespace) -> None:
    """Save a tokenizer of the conversations' words and letters, and a Llama with random weights."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator((message["content"] for chat in chats for message in chat), trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<|pad|>", eos_token="<|im_end|>", chat_template=_TEMPLATE,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=options.hidden, num_hidden_layers=options.layers,
        num_attention_heads=_HEADS, num_key_value_heads=_HEADS, intermediate_size=16 * options.hidden // 5,
        max_position_embeddings=512, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(options.folder / "model")
    tokenizer.save_pretrained(options.folder / "model")
    millions = model.num_parameters() / 1e6
    print(f"{options.folder / 'model'}: {millions:.1f} million parameters")


def answer(folder: Path, question: str) -> str:
    """The most likely answer of the model in a folder."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
    )
    made = model.generate(**asked, max_new_tokens=20, do_sample=False)
    return tokenizer.decode(made[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    sys.exit(main())
