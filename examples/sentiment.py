"""A small model and data to fine-tune it on: short texts with human ratings, and a BERT or a T5 that knows others.

    pip download --no-deps --no-binary :all: --dest DOWNLOADS vaderSentiment==3.3.2
    python examples/sentiment.py DOWNLOADS/vaderSentiment-3.3.2.tar.gz --folder DATA

The texts are those of examples/reviews.py: `train.jsonl`, `validation.jsonl` and `test.jsonl` (text, label) are film
reviews. A BERT learns to tell whether texts of the other three sets are positive, and is saved as `DATA/bert`, so that
what follows is fine-tuning. With `--architecture t5` a T5 learns to answer `positive` or `negative`, and is `DATA/t5`.
"""

import argparse
import sys
from pathlib import Path

import reviews
import torch

_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_ANSWERS = ("negative", "positive")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, help="the package's source, vaderSentiment-3.3.2.tar.gz")
    parser.add_argument("--folder", type=Path, required=True, help="where data and model go")
    parser.add_argument("--architecture", choices=("bert", "t5"), default="bert", help="of the model (default: bert)")
    parser.add_argument("--layers", type=int, default=2, help="of the BERT, or of each part of the T5 (default: 2)")
    parser.add_argument("--hidden", type=int, default=64, help="its width (default: 64)")
    parser.add_argument("--epochs", type=int, default=2, help="over the other sets (default: 2)")
    options = parser.parse_args()
    texts = reviews.read(options.archive)
    train = reviews.write_reviews(texts, options.folder)
    pretrain(reviews.others(texts), [text for text, _ in train], options)
    return 0


def pretrain(rated: list[tuple[str, float]], own: list[str], options: argparse.Namespace) -> None:
    """Make a tokenizer of all texts, and a model that has learned whether `rated` ones are positive; save both."""
    import transformers

    tokenizer = tokenizer_of([*(text for text, _ in rated), *own], options.architecture)
    torch.manual_seed(0)
    model = model_of(tokenizer, options)
    texts = [text for text, _ in rated]
    encoded = tokenizer(texts, truncation=True, max_length=32, padding="max_length", return_tensors="pt")
    labels = torch.tensor([int(score > 0) for _, score in rated])
    if options.architecture == "t5":
        labels = tokenizer(list(_ANSWERS), return_tensors="pt")["input_ids"][labels]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    size, generator = 32, torch.Generator().manual_seed(0)
    num_batches = options.epochs * (len(texts) // size)
    scheduler = transformers.get_scheduler("linear", optimizer, num_batches // 10, num_batches)
    model.train()
    for batch in range(num_batches):
        chosen = torch.randint(len(texts), (size,), generator=generator)
        loss = model(
            encoded["input_ids"][chosen], attention_mask=encoded["attention_mask"][chosen], labels=labels[chosen]
        ).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if batch % 200 == 0 or batch == num_batches - 1:
            print(f"pretraining: batch {batch + 1} of {num_batches}, loss {loss.item():.3f}", flush=True)
    model.save_pretrained(options.folder / options.architecture)
    tokenizer.save_pretrained(options.folder / options.architecture)


def model_of(tokenizer, options: argparse.Namespace) -> torch.nn.Module:
    """A model with random weights."""
    import transformers

    if options.architecture == "t5":
        config = transformers.T5Config(
            vocab_size=len(tokenizer), d_model=options.hidden, num_layers=options.layers, num_heads=4,
            d_kv=options.hidden // 4, d_ff=2 * options.hidden, pad_token_id=tokenizer.pad_token_id,
            decoder_start_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=options.hidden, num_hidden_layers=options.layers, num_attention_heads=4,
        intermediate_size=2 * options.hidden, max_position_embeddings=64, num_labels=2,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def tokenizer_of(texts: list[str], architecture: str = "bert"):
    """A WordPiece tokenizer of 4,000 pieces, as BERT's are. A T5's texts begin with no token, and its answers are a
    piece each."""
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special, names = _SPECIAL, {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    if architecture == "t5":
        special, names = [*_SPECIAL, *_ANSWERS], {"eos_token": "[SEP]"}
    trainer = trainers.WordPieceTrainer(vocab_size=4000, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    if architecture == "t5":
        tokenizer.post_processor = processors.TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 3)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]",
        model_input_names=["input_ids", "attention_mask"], **names,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
