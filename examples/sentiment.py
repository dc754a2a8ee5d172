"""A small model and data to fine-tune it on: short texts with human ratings, and a BERT that knows others.

    pip download --no-deps --no-binary :all: --dest DOWNLOADS vaderSentiment==3.3.2
    python examples/sentiment.py DOWNLOADS/vaderSentiment-3.3.2.tar.gz --folder DATA

The texts are those of examples/reviews.py: `train.jsonl`, `validation.jsonl` and `test.jsonl` (text, label) are film
reviews. A BERT learns to tell whether texts of the other three sets are positive, and is saved as `DATA/bert`, so that
what follows is fine-tuning.
"""

import argparse
import sys
from pathlib import Path

import reviews
import torch

_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, help="the package's source, vaderSentiment-3.3.2.tar.gz")
    parser.add_argument("--folder", type=Path, required=True, help="where data and model go")
    parser.add_argument("--layers", type=int, default=2, help="of the BERT (default: 2)")
    parser.add_argument("--hidden", type=int, default=64, help="its width (default: 64)")
    parser.add_argument("--epochs", type=int, default=2, help="over the other sets (default: 2)")
    options = parser.parse_args()
    texts = reviews.read(options.archive)
    train = reviews.write_reviews(texts, options.folder)
    pretrain(reviews.others(texts), [text for text, _ in train], options)
    return 0


def pretrain(rated: list[tuple[str, float]], own: list[str], options: argparse.Namespace) -> None:
    """Make a tokenizer of all texts, and a BERT that has learned whether `rated` ones are positive; save both."""
    import transformers

    tokenizer = tokenizer_of([*(text for text, _ in rated), *own])
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=options.hidden, num_hidden_layers=options.layers, num_attention_heads=4,
        intermediate_size=2 * options.hidden, max_position_embeddings=64, num_labels=2,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    texts = [text for text, _ in rated]
    encoded = tokenizer(texts, truncation=True, max_length=32, padding="max_length", return_tensors="pt")
    labels = torch.tensor([int(score > 0) for _, score in rated])
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
    model.save_pretrained(options.folder / "bert")
    tokenizer.save_pretrained(options.folder / "bert")


def tokenizer_of(texts: list[str]):
    """A WordPiece tokenizer of 4,000 pieces, as BERT's are."""
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=4000, special_tokens=_SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
