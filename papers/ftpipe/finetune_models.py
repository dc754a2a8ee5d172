"""Models with random weights, their tokenizer, and samples of made-up words, for the benchmarks of fine-tuning."""

import json
import random
from pathlib import Path

SAMPLES = 400
SOURCE, TARGET = 256, 96  # number of tokens of a T5 sample's source and target


def write_t5(folder: Path, *, length: int = SOURCE, target: int = TARGET, **shape: int) -> None:
    """Write a T5 of one encoder and one decoder layer to `t5`, and samples to `train.jsonl`.

    `length`, `target`: number of tokens of a source and of a target. `shape`: other values of the configuration. The
    products of the feed-forwards and of the head, over 4,000 words, take most of the time in the default shape.
    """
    import torch
    import transformers

    words = _words(4_000)
    tokenizer = _tokenizer(words, ("<pad>", "</s>", "<unk>"), single="$A </s>", pad="<pad>", eos_token="</s>")
    torch.manual_seed(0)
    shape = {"d_model": 1024, "d_ff": 2048, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2} | shape
    config = transformers.T5Config(
        vocab_size=len(tokenizer), d_kv=64, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
        **shape,
    )  # fmt: skip
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder / "t5")
    tokenizer.save_pretrained(folder / "t5")
    choose = random.Random(0)
    _write(
        folder / "train.jsonl",
        [
            {"source": _text(choose, words, length - 1), "target": _text(choose, words, target - 1)}
            for _ in range(SAMPLES)
        ],
    )


def write_bert(folder: Path, *, length: int) -> None:
    """Write a BERT of 4 layers for two classes to `bert`, and texts of `length` tokens with classes to
    `train.jsonl`."""
    import torch
    import transformers

    words = _words(1_000)
    tokenizer = _tokenizer(
        words,
        ("[PAD]", "[CLS]", "[SEP]", "[UNK]"),
        single="[CLS] $A [SEP]",
        pad="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512,
        max_position_embeddings=length, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2,
        pad_token_id=0,
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(folder / "bert")
    tokenizer.save_pretrained(folder / "bert")
    choose = random.Random(0)
    _write(
        folder / "train.jsonl",
        [{"text": _text(choose, words, length - 2), "label": choose.randrange(2)} for _ in range(SAMPLES)],
    )


def _words(count: int) -> list[str]:
    return [f"w{number}" for number in range(count)]


def _tokenizer(words: list[str], special: tuple[str, ...], *, single: str, pad: str, **names: str):
    """Make a tokenizer with a token for each word.

    `special`: the special tokens, in the order of their numbers. `single`: the template of a text.
    """
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    numbers = {word: number for number, word in enumerate([*special, *words])}
    unknown = next(word for word in special if "unk" in word.lower())
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    added = [(word, numbers[word]) for word in single.split() if word in numbers]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=added)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, unk_token=unknown,
        model_input_names=["input_ids", "attention_mask"], **names,
    )  # fmt: skip


def _text(choose: random.Random, words: list[str], length: int) -> str:
    return " ".join(choose.choices(words, k=length))


def _write(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
