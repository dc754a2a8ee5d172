"""Train a WordPiece vocabulary for BERT on a JSON-lines corpus, offline.

    python examples/quickstart/train_wordpiece.py corpus.jsonl vocab.txt --vocab-size 1024

For `--tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt`.

Problem: the trainer of the `tokenizers` package numbers the pieces anew in every process, and resolves ties by these
numbers, so that two runs disagree. Solution: SentencePiece merges pairs in a fixed order. It gets BERT's own words
(lower case, punctuation apart); its pieces become WordPiece's, with `##` where they do not begin a word. Each character
stands in the vocabulary both ways, so no word of these characters is unknown.
"""

import argparse
import io
import json
from pathlib import Path

import sentencepiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # [PAD] first: megatron.core's BERT pads with 0
_BEGINS_WORD = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's mark


def words(text: str) -> list[str]:
    """What BERT's tokenizer cuts `text` into before it looks at the vocabulary."""
    normal = BertNormalizer(lowercase=True).normalize_str(text)
    return [word for word, _ in BertPreTokenizer().pre_tokenize_str(normal)]


def train(texts: list[str], *, vocab_size: int) -> list[str]:
    """The vocabulary, in the order of its ids. Raises ValueError if `vocab_size` has no room for the characters."""
    lines = [" ".join(words(text)) for text in texts]
    characters = sorted({character for line in lines for character in line if character != " "})
    vocabulary = dict.fromkeys([*SPECIAL, *characters, *(f"##{character}" for character in characters)])
    if len(vocabulary) > vocab_size:
        raise ValueError(f"a vocabulary of {vocab_size} has no room for {len(vocabulary)} characters and marks")
    for piece in _pieces(lines, vocab_size=vocab_size):
        vocabulary.setdefault(piece)
    return list(vocabulary)[:vocab_size]


def _pieces(lines: list[str], *, vocab_size: int) -> list[str]:
    """SentencePiece's merges in WordPiece's form, the most frequent first."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,  # a short text has fewer pieces
        character_coverage=1.0,
        normalization_rule_name="identity",
        split_by_unicode_script=False,
        max_sentence_length=1 << 20,
        num_threads=1,  # the result must not depend on the machine
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = [processor.id_to_piece(number) for number in range(processor.get_piece_size())]
    pieces = [piece for number, piece in enumerate(pieces) if not processor.is_control(number)]
    return [
        piece.removeprefix(_BEGINS_WORD) if piece.startswith(_BEGINS_WORD) else f"##{piece}"
        for piece in pieces
        if piece not in (_BEGINS_WORD, "<unk>")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="JSON lines with a 'text' each")
    parser.add_argument("output", type=Path, help="the vocabulary file to write")
    parser.add_argument("--vocab-size", type=int, default=1024)
    args = parser.parse_args()
    with args.corpus.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    vocabulary = train(texts, vocab_size=args.vocab_size)
    args.output.write_text("".join(f"{piece}\n" for piece in vocabulary), encoding="utf-8")
    print(f"{len(vocabulary)} pieces in {args.output}")


if __name__ == "__main__":
    main()
