"""Which data files a language model reads, and by which weights. No torch in here."""

import argparse
import json
import math
import os

Blend = tuple[list[str], list[float] | None]
_PER_SPLIT = ("train_data_path", "valid_data_path", "test_data_path")


def parse_blend(words: list[str] | None, source: str = "--data-path") -> Blend | None:
    """A blend's words: prefixes, or weights and prefixes in turn. A prefix of weight 0 is left out.

    Raises ValueError, naming `source`, for weights that are none.
    """
    if not words:
        return None
    try:
        weights = [float(word) for word in words[0::2]]
    except ValueError:
        return list(words), None
    prefixes = words[1::2]
    if len(words) == 1 or len(prefixes) != len(weights):
        return list(words), None
    for word, weight, prefix in zip(words[0::2], weights, prefixes, strict=True):
        if not math.isfinite(weight) or weight < 0:
            what = "negative" if weight < 0 else "no finite number"
            raise ValueError(
                f"{source} gives {prefix} the weight {word}, which is {what}; give each prefix a number above 0, or 0 "
                "to leave it out"
            )
    if not any(weights):
        raise ValueError(f"{source} gives every prefix the weight 0, so there is nothing to read; weigh one above 0")
    read = [(prefix, weight) for prefix, weight in zip(prefixes, weights, strict=True) if weight]
    return [prefix for prefix, _ in read], [weight for _, weight in read]


def blends(args: argparse.Namespace) -> tuple[Blend | None, list[Blend | None] | None]:
    """(one blend that is split, or None; a blend per split, or None). Both None mean mock data. Raises ValueError."""
    blend, *per_split = [parse_blend(words, source) for source, words in _sources(args)]
    return blend, per_split if any(per_split) else None


def notes_on_weights(args: argparse.Namespace) -> list[str]:
    """A note for each source of which weights of 0 leave prefixes out. Raises ValueError for weights that are none. A
    file that is not here is another's business."""
    files = (args.data_args_path, args.per_split_data_args_path)
    notes: list[str] = []
    if any(path and not os.path.isfile(path) for path in files):
        return notes
    for source, words in _sources(args):
        blend = parse_blend(words, source)
        if blend is not None and blend[1] is not None and 2 * len(blend[0]) < len(words):
            left_out = [prefix for weight, prefix in zip(words[0::2], words[1::2], strict=True) if not float(weight)]
            notes.append(f"nothing is read of {', '.join(left_out)}: {source} gives the weight 0")
    return notes


def _sources(args: argparse.Namespace) -> list[tuple[str, list[str] | None]]:
    """(flag or file, words) of the blend that is split, then of each split's own."""
    if args.mock_data:
        return [("--mock-data", None)]
    if args.data_args_path:
        return [(f"--data-args-path {args.data_args_path}", _read(args.data_args_path).split())]
    if args.per_split_data_args_path:
        name = f"--per-split-data-args-path {args.per_split_data_args_path}"
        try:
            per_split = json.loads(_read(args.per_split_data_args_path))
        except json.JSONDecodeError as error:
            raise ValueError(f"{name} is not JSON: {error}") from error
        splits = ("train", "valid", "test")
        if not isinstance(per_split, dict) or not all(isinstance(words, list) for words in per_split.values()):
            raise ValueError(f'{name} is no object of lists; write such as {{"train": ["1", "PREFIX"]}}')
        if not any(per_split.get(split) for split in splits):
            raise ValueError(f"{name} names no data; give the keys {', '.join(splits)} lists of weights and prefixes")
        return [(name, None), *((f"{name}, {split}", list(map(str, per_split.get(split, ())))) for split in splits)]
    if args.data_path:
        return [("--data-path", args.data_path)]
    return [("--data-path", None), *((f"--{name.replace('_', '-')}", getattr(args, name)) for name in _PER_SPLIT)]


def _read(path: str) -> str:
    if not os.path.isfile(path):
        raise ValueError(f"file {path} does not exist")
    with open(path, encoding="utf-8") as stream:
        return stream.read()
