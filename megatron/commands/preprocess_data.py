"""Turn JSON lines into Megatron's .bin/.idx pairs.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json --append-eod --workers 4

Each line is a JSON object; empty lines are left out. Each of `--json-keys` becomes `PREFIX_KEY_document.bin` and
`.idx`, which `--data-path PREFIX_KEY_document` reads. Documents keep the order of the lines, so the files do not
depend on the number of workers. The files appear under their names only when they are complete.

For BERT, `--split-sentences` keeps a document as a list of sentences, in `PREFIX_KEY_sentence`. If a key has a list of
texts, each text is a sentence; a single text is split by the rules of megatron/trainer/files/text_files.py.
"""

import argparse
import collections
import glob
import itertools
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from megatron.documents import command_line
from megatron.documents.files import is_compressed, open_text, require_characters, with_room
from megatron.processes import end_worker_with_parent
from megatron.trainer.arguments.flags import files as data_flags
from megatron.trainer.arguments.flags.parser import build_parser, fill_defaults, parse_known, refuse
from megatron.trainer.arguments.flags.refusals import refused
from megatron.trainer.arguments.flags.specification import Group, option, switch
from megatron.trainer.arguments.rules.data import tokenizer as check_tokenizer
from megatron.trainer.files.text_files import LONGEST_SENTENCE, split_sentences


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Input:
    """What is read and written."""

    input: str | None = option(
        None,
        "File with one JSON object a line, plain or compressed (.gz, .bz2, .xz); a pattern such as 'part-*.jsonl' "
        "names several.",
        metavar="FILE",
    )
    output_prefix: str | None = option(None, "Start of the names of the written files.", metavar="PREFIX")
    json_keys: list[str] = option(["text"], "Keys of the objects that hold text.", nargs="+", metavar="KEY")
    workers: int = option(1, "Processes that tokenize.")
    append_eod: bool = switch("End each document with the end-of-document token.")
    log_interval: int = option(1000, "Documents between lines of progress (where output is no terminal).")
    split_sentences: bool = switch(
        "Keep documents as lists of sentences, as BERT needs them, in files that end in _sentence. A key may hold "
        f"a list of sentences. Sentences of more than {LONGEST_SENTENCE} tokens are cut."
    )


INPUT = Group.of(
    Input,
    "input and output",
    further=(
        refused("--keep-newlines", "newlines are always kept; leave the flag out."),
        refused("--partitions N 1", "all input is read in one pass; use --workers."),
        refused("--dataset-impl TEXT mmap", "the only format is mmap; leave the flag out."),
    ),
)
GROUPS = (INPUT, data_flags.TOKENIZER)

_CHUNK = 64  # lines that go to a worker at once
_encoder = None


class _Encoder:
    """The encoder of a worker: it turns a line into token ids."""

    def __init__(self, args: argparse.Namespace) -> None:
        from megatron.trainer.data.tokenizer import build_tokenizer, id_limit

        self.keys, self.append_eod, self.splits = args.json_keys, args.append_eod, args.split_sentences
        self.tokenizer = build_tokenizer(args)
        self.id_limit = id_limit(args, self.tokenizer)

    def encode(self, where: str, line: str) -> tuple[dict[str, list[list[int]]], int]:
        """Encode one line. Returns key -> token ids of each sequence that is not empty, and the length of the line.

        Raises ValueError with file and line if the line cannot be encoded.
        """
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON: {error}") from error
        if not isinstance(document, dict):
            raise ValueError(f"{where}: not a JSON object but {type(document).__name__}")
        ids = {}
        for key in self.keys:
            texts = self._texts(document.get(key))
            if texts is None:
                raise ValueError(f"{where}: no text under the key '{key}'; see --json-keys")
            texts = [require_characters(text, f"{where}: the text under '{key}'") for text in texts if text]
            try:
                sequences = [list(self.tokenizer.tokenize(text)) for text in texts]
            except Exception as error:  # each tokenizer library raises errors of its own classes
                raise ValueError(f"{where}: cannot be tokenized: {str(error) or type(error).__name__}") from error
            self._require_known(sequences, where)
            if self.splits:
                sequences = [part for tokens in sequences for part in _pieces(tokens)]
            sequences = [tokens for tokens in sequences if tokens]
            if sequences and self.append_eod:
                sequences[-1].append(self.tokenizer.eod)
            ids[key] = sequences
        return ids, len(line)

    def _require_known(self, sequences: list[list[int]], where: str) -> None:
        """Refuse an id that is none of the tokenizer's and not below --vocab-size; the files' type may not hold it."""
        for tokens in filter(None, sequences):
            if min(tokens) < 0 or max(tokens) >= self.id_limit:
                wrong = next(token for token in tokens if not 0 <= token < self.id_limit)
                raise ValueError(
                    f"{where}: the token {wrong} is none of the vocabulary, whose ids end at {self.id_limit - 1}; "
                    "mend the text, or give a larger --vocab-size"
                )

    def _texts(self, value: object) -> list[str] | None:
        """The texts of a document's sequences; None if `value` is neither a text nor an allowed list of texts."""
        if isinstance(value, str):
            return split_sentences(value) if self.splits else [value]
        is_list = self.splits and isinstance(value, list) and all(isinstance(item, str) for item in value)
        return value if is_list else None


def _pieces(tokens: list[int]) -> list[list[int]]:
    """A sentence cut into pieces of almost equal length, at most the length that megatron.core's BERT samples allow."""
    size = -(-len(tokens) // -(-len(tokens) // LONGEST_SENTENCE)) if tokens else 1
    return [tokens[start : start + size] for start in range(0, len(tokens), size)]


def _start_worker(args: argparse.Namespace) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends SIGINT to all processes; the parent ends workers
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # undo the parent's handlers, which a fork inherits
    end_worker_with_parent()
    _make_encoder(args)


def _make_encoder(args: argparse.Namespace) -> None:
    global _encoder
    _encoder = _Encoder(args)


def _work(items: list[tuple[str, str]]) -> list[tuple[dict[str, list[list[int]]], int] | str]:
    results = []
    for item in items:
        try:
            results.append(_encoder.encode(*item))
        except ValueError as error:
            return [*results, str(error)]
    return results


def lines(paths: list[str]) -> Iterator[tuple[str, str]]:
    """Yield ("file:line", text) of all non-empty lines in order. Raises ValueError for a file that is not text."""
    for path in paths:
        with open_text(path, newline="\n") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield f"{path}:{number}", line


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line. Raises ValueError for a wrong command line or missing files."""
    parser = build_parser("preprocess_data.py", GROUPS)
    parser.description = "Turn JSON lines into Megatron's .bin/.idx pairs."
    args = fill_defaults(parse_known(parser, sys.argv[1:] if argv is None else argv), GROUPS)
    refuse(args, GROUPS)
    for name in ("input", "output_prefix"):
        if getattr(args, name) is None:
            raise ValueError(f"--{name.replace('_', '-')} is needed")
    if args.workers < 1 or args.log_interval < 1:
        raise ValueError("--workers and --log-interval must be at least 1")
    check_tokenizer(args)
    is_pattern = glob.has_magic(args.input) and not os.path.isfile(args.input)  # data[1].jsonl may be a file's name
    args.paths = sorted(glob.glob(args.input)) if is_pattern else [args.input]
    for path in args.paths or [args.input]:
        if not os.path.isfile(path):
            raise ValueError(f"--input {path} does not exist")
    folder = os.path.dirname(args.output_prefix) or "."
    if not os.path.isdir(folder):
        raise ValueError(f"--output-prefix {args.output_prefix}: the directory {folder} does not exist")
    for key in args.json_keys:
        if "/" in key:
            raise ValueError(f"--json-keys {key} would be a part of files' names, which take no '/'; rename the key")
    return args


class _Progress:
    """The display of progress: a bar on a terminal, otherwise a line every `log_interval` documents."""

    def __init__(self, total_bytes: int | None, log_interval: int) -> None:
        self.start, self.log_interval = time.monotonic(), log_interval
        self.documents = self.bytes = 0
        self.bar = None
        if sys.stderr.isatty():
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self.bar = Progress(
                TextColumn("tokenizing"),
                BarColumn(),
                TextColumn("{task.fields[documents]} documents"),
                TimeRemainingColumn(),
            )
            self.task = self.bar.add_task("", total=total_bytes, documents=0)
            self.bar.start()

    def add(self, num_bytes: int) -> None:
        self.documents += 1
        self.bytes += num_bytes
        if self.bar is not None:
            self.bar.update(self.task, completed=self.bytes, documents=self.documents)
        elif self.documents % self.log_interval == 0:
            elapsed = time.monotonic() - self.start
            sys.stderr.write(
                f"{self.documents} documents, {self.documents / elapsed:.0f} documents/s, "
                f"{self.bytes / elapsed / 2**20:.1f} MiB/s\n"
            )

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def final_prefixes(args: argparse.Namespace) -> dict[str, str]:
    """JSON key -> the path prefix of its files."""
    level = "sentence" if args.split_sentences else "document"
    return {key: f"{args.output_prefix}_{key}_{level}" for key in args.json_keys}


def preprocess(args: argparse.Namespace) -> dict[str, int]:
    """Write the .bin/.idx pairs. Returns the numbers of documents and tokens.

    Raises ValueError for wrong input; no incomplete file is left behind.
    """
    from megatron import backend

    backend.install()
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    from megatron.trainer.data.tokenizer import build_tokenizer, id_limit

    dtype = DType.optimal_dtype(id_limit(args, build_tokenizer(args)))
    finals = final_prefixes(args)
    partials = {key: f"{final}.{os.getpid()}.partial" for key, final in finals.items()}
    counts = {"documents": 0, "tokens": 0}
    size = None if any(map(is_compressed, args.paths)) else sum(map(os.path.getsize, args.paths))
    progress = _Progress(size, args.log_interval)
    try:
        with with_room(f"--output-prefix {args.output_prefix}"):
            builders = {key: IndexedDatasetBuilder(f"{path}.bin", dtype=dtype) for key, path in partials.items()}
            for result in _encoded(args):
                if isinstance(result, str):
                    raise ValueError(result)
                documents, num_bytes = result
                for key, sequences in documents.items():
                    tokens = list(itertools.chain.from_iterable(sequences))
                    builders[key].add_document(tokens, list(map(len, sequences)))  # an empty text stays a document
                    counts["tokens"] += len(tokens)
                counts["documents"] += 1
                progress.add(num_bytes)
            if counts["tokens"] == 0:
                raise ValueError(f"{args.input} has no text under {', '.join(args.json_keys)}")
            for key, path in partials.items():
                builders[key].finalize(f"{path}.idx")
            for path in finals.values():  # an index that was there must not meet other tokens, whenever this is killed
                if os.path.exists(f"{path}.idx"):
                    os.remove(f"{path}.idx")
            for key, path in partials.items():
                for suffix in (".bin", ".idx"):
                    with open(path + suffix, "rb") as stream:
                        os.fsync(stream.fileno())
                    os.replace(path + suffix, finals[key] + suffix)
    finally:
        progress.close()
        for path in partials.values():
            for suffix in (".bin", ".idx"):
                if os.path.exists(path + suffix):
                    os.remove(path + suffix)
    return counts


def _encoded(args: argparse.Namespace) -> Iterator:
    """Yield the encoded lines in order, an error as its text. The number of lines queued for workers is bounded."""
    chunks = _chunks(lines(args.paths))
    if args.workers == 1:
        _make_encoder(args)
        for chunk in chunks:
            yield from _work(chunk)
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(args.workers, context, initializer=_start_worker, initargs=(args,)) as pool:
        waiting = collections.deque()
        try:
            for chunk in chunks:
                waiting.append(pool.submit(_work, chunk))
                if len(waiting) > 4 * args.workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        except BrokenProcessPool as error:
            raise ValueError(
                f"a worker died ({error}); is there enough memory for --workers {args.workers}?"
            ) from error
        finally:
            for future in waiting:
                future.cancel()


def _chunks(items: Iterator) -> Iterator[list]:
    while chunk := list(itertools.islice(items, _CHUNK)):
        yield chunk


def main() -> int:
    """Run the command. Returns the exit status."""
    logging.basicConfig(level=logging.WARNING)
    try:
        args = parse_args()
        with command_line.unwinding("no file is written"):
            counts = preprocess(args)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"preprocess_data.py: error: {error}\n")
        return 2
    sys.stderr.write(
        f"{counts['documents']} documents, {counts['tokens']} tokens: {', '.join(final_prefixes(args).values())}\n"
    )
    return 0
