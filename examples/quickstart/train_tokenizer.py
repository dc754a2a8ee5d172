"""Train a SentencePiece BPE tokenizer on a JSON-lines corpus, offline.

    python examples/quickstart/train_tokenizer.py corpus.jsonl tokenizer.model --vocab-size 1024

Text comes back as it was: spaces are kept, newlines are tokens, and unseen characters fall back to bytes. `</s>` ends a
document. For `--tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model`.
"""

import argparse
import io
import json
from pathlib import Path

import sentencepiece


def train(texts: list[str], *, vocab_size: int) -> bytes:
    """A serialized SentencePiece model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in texts for line in text.split("\n") if line]),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        character_coverage=1.0,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["\n"],
        max_sentence_length=16384,
        num_threads=1,  # the result must not depend on the machine
        minloglevel=2,
    )
    return model.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="JSON lines with a 'text' each")
    parser.add_argument("output", type=Path, help="the model file to write")
    parser.add_argument("--vocab-size", type=int, default=1024)
    args = parser.parse_args()
    with args.corpus.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    args.output.write_bytes(train(texts, vocab_size=args.vocab_size))
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(args.output))
    num_tokens, num_characters = sum(map(len, tokenizer.encode(texts))), sum(map(len, texts))
    print(f"{args.vocab_size} tokens in {args.output}", end="; ")
    print(f"the corpus has {num_tokens:,}, of {num_characters / num_tokens:.2f} characters on average")


if __name__ == "__main__":
    main()
