"""Short texts with human ratings, for finetune.py and finetune_bert.py, and others to pretrain a BERT on.

    pip download --no-deps --no-binary :all: --dest DOWNLOADS vaderSentiment==3.3.2
    python examples/reviews.py DOWNLOADS/vaderSentiment-3.3.2.tar.gz --folder DATA

The source of the package vaderSentiment (Hutto and Gilbert, 2014; MIT licence) holds film reviews in single sentences,
product reviews, news and tweets, each with the mean of 20 people's ratings. Film reviews rated 0.5 or more from neutral
become `train.jsonl`, `validation.jsonl` and `test.jsonl` (text, label). `corpus.jsonl` has texts alone, one a line:
those of the other three sets and of `train.jsonl`.
"""

import argparse
import io
import json
import random
import sys
import tarfile
from pathlib import Path

_OUTER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
_REVIEWS = "movieReviewSnippets_GroundTruth.txt"
_OTHERS = ("amazonReviewSnippets_GroundTruth.txt", "nytEditorialSnippets_GroundTruth.txt", "tweets_GroundTruth.txt")
_NUM_TEST, _NUM_VALIDATION = 2500, 1500
_NEUTRAL = 0.5

Rated = list[tuple[str, float]]
"""Texts and ratings, -4 to 4."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, help="the package's source, vaderSentiment-3.3.2.tar.gz")
    parser.add_argument("--folder", type=Path, required=True, help="where the files go")
    parser.add_argument("--seed", type=int, default=0, help="another one shares out the film reviews anew")
    options = parser.parse_args()
    texts = read(options.archive)
    reviews = write_reviews(texts, options.folder, seed=options.seed)
    corpus = [text for name in _OTHERS for text, _ in texts[name]] + [text for text, _ in reviews]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in corpus)
    (options.folder / "corpus.jsonl").write_text(lines, encoding="utf-8")
    print(f"corpus.jsonl: {len(corpus)} texts")
    return 0


def read(archive: Path) -> dict[str, Rated]:
    """What each file has."""
    found = {}
    with tarfile.open(archive) as outer:
        inner = io.BytesIO(outer.extractfile(_OUTER).read())
    with tarfile.open(fileobj=inner) as files:
        for member in files.getmembers():
            name = Path(member.name).name
            if name in (_REVIEWS, *_OTHERS):
                lines = files.extractfile(member).read().decode("utf-8", errors="replace").splitlines()
                fields = (line.split("\t") for line in lines if line.count("\t") >= 2)
                found[name] = [(text, float(score)) for _, score, text, *_ in fields]
    return found


def write_reviews(texts: dict[str, Rated], folder: Path, *, seed: int = 0) -> Rated:
    """Write the reviews in their three files; returns those to train on."""
    folder.mkdir(parents=True, exist_ok=True)
    reviews = [(text, score) for text, score in texts[_REVIEWS] if abs(score) >= _NEUTRAL]
    random.Random(seed).shuffle(reviews)
    first = _NUM_TEST + _NUM_VALIDATION
    parts = {
        "test": reviews[:_NUM_TEST],
        "validation": reviews[_NUM_TEST:first],
        "train": reviews[first:],
    }
    for name, part in parts.items():
        lines = [{"text": text, "label": "positive" if score > 0 else "negative"} for text, score in part]
        content = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(content, encoding="utf-8")
        print(f"{name}.jsonl: {len(lines)} reviews, {sum(line['label'] == 'positive' for line in lines)} positive")
    return parts["train"]


def others(texts: dict[str, Rated]) -> Rated:
    """The texts of the other three sets that are not neutral."""
    return [(text, score) for name in _OTHERS for text, score in texts[name] if abs(score) >= _NEUTRAL]


if __name__ == "__main__":
    sys.exit(main())
