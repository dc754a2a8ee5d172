"""Write CPython's reference topics (`pydoc_data.topics`, English text that every machine has) as JSON lines.

    python examples/quickstart/make_corpus.py outputs/quickstart/corpus.jsonl

Problem: the topics repeat each other's sections, so a split by topic would hold out text that the model has seen. So
each paragraph is kept once, paragraphs are gathered into documents of about 1,500 characters, and the documents are put
in a fixed random order: the last part, which `--split` holds out for validation, is then unseen text of the same kind.
"""

import argparse
import json
import random
from pathlib import Path
from pydoc_data.topics import topics

DOCUMENT_CHARACTERS = 1500


def paragraphs() -> list[list[str]]:
    """The paragraphs of each topic that no earlier topic has; short topics, which others quote, come first."""
    seen: set[str] = set()
    result = []
    for name in sorted(topics, key=lambda name: (len(topics[name]), name)):
        fresh = []
        for paragraph in topics[name].split("\n\n"):
            key = " ".join(paragraph.split())
            if key and key not in seen:
                seen.add(key)
                fresh.append(paragraph.strip("\n"))
        result.append(fresh)
    return result


def documents() -> list[str]:
    """Runs of paragraphs of one topic, each of at least `DOCUMENT_CHARACTERS` unless the topic ends."""
    result = []
    for topic in paragraphs():
        start = size = 0
        for end, paragraph in enumerate(topic, start=1):
            size += len(paragraph)
            if size >= DOCUMENT_CHARACTERS or end == len(topic):
                result.append("\n\n".join(topic[start:end]) + "\n")
                start, size = end, 0
    random.Random(1234).shuffle(result)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="file to write, one {'text': ...} a line")
    args = parser.parse_args()
    texts = documents()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    print(f"{len(texts)} documents, {sum(map(len, texts)):,} characters in {args.output}")


if __name__ == "__main__":
    main()
