"""Turn a Hugging Face model into a checkpoint, and a checkpoint into a Hugging Face model.

    python tools/convert_checkpoint.py Llama-3.1-8B checkpoints --to torch_dist
    torchrun ... pretrain_gpt.py @checkpoints/flags.txt --load checkpoints ...     # starts at iteration 0
    python tools/convert_checkpoint.py checkpoints exported --to hugging-face
    python tools/convert_checkpoint.py Llama-3.1-8B --to flags                     # the model as a command line

SOURCE is a folder of a Hugging Face model (config.json and safetensors), or a directory of checkpoints in torch_dist
or in Megatron-LM's old format (mp_rank_XX). Weights are copied block by block and bit by bit: the memory needed does
not grow with the model. What is written appears whole or not at all. See docs/huggingface.md.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import glob
import json
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.documents import GIB, command_line, flag_types
from megatron.documents.files import with_room

TARGETS = ("torch_dist", "hugging-face", "flags")
FLAGS_FILE = "flags.txt"
BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
"""Files of a tokenizer and of generation, which are copied as they are."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_OF_PROGRAM = {
    "gpt": ("--mock-data",),
    "bert": ("--data-path", "none", "--vocab-file", "none"),
    "t5": ("--data-path", "none", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "none"),
}
"""Architecture -> what its program needs besides the model."""
_TOKENS_OF_T5 = 512  # any number serves, since its weights depend on none


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.parser_of(__doc__)
    parser.add_argument("source", type=Path, metavar="SOURCE", help="folder of the model, or directory of checkpoints")
    parser.add_argument("output", type=Path, nargs="?", metavar="OUTPUT", help="folder to make")
    command_line.add_flags(
        parser,
        ("--to", str, None, "what to make", {"choices": TARGETS, "required": True}),
        ("--ckpt-step", int, "N", "convert the checkpoint of this iteration instead of the latest"),
        ("--make-vocab-size-divisible-by", flag_types.count, "N",
         "of a Hugging Face model: pad the vocabulary to a multiple of this; training pads anew", {"default": 128}),
        ("--vocab-size", flag_types.count, "N",
         "of a checkpoint: rows of its vocabulary without padding (default: as its arguments say)"),
        ("--config", Path, "FILE",
         "to hugging-face: the config.json to write, of the same model; without it one is made of the checkpoint's "
         "arguments"),
        ("--max-shard-size", flag_types.positive, "GIB", "to hugging-face: largest file", {"default": 5.0}),
    )  # fmt: skip
    options = parser.parse_intermixed_args(argv)  # OUTPUT may stand behind a flag
    if (options.output is None) != (options.to == "flags"):
        parser.error("--to flags prints, and takes no OUTPUT" if options.output else "name the folder to make, OUTPUT")
    return options


def convert(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status. Raises ValueError for an error of the user."""
    source: Path = options.source
    if not source.is_dir():
        raise ValueError(f"{source} is no folder; name a Hugging Face model's, or a directory of checkpoints")
    holds_checkpoint = (source / "latest_checkpointed_iteration.txt").is_file()
    is_hugging_face = (source / "config.json").is_file() and not holds_checkpoint
    if options.to == "flags" and is_hugging_face:
        from megatron.trainer.arguments.hugging_face import model_of, read_config

        print(_as_file(model_of(read_config(source), source / "config.json").argv()), end="")
        return 0
    if is_hugging_face:
        for name in ("ckpt_step", "vocab_size", "config"):
            if getattr(options, name) is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')} is about a checkpoint, and {source} is a Hugging Face model; leave it "
                    "out"
                )
    if options.output is not None and options.output.exists() and not _is_empty(options.output, options.to):
        raise ValueError(f"{options.output} is not empty; name a folder that does not exist yet")

    from megatron import backend  # imports torch

    backend.install()
    if is_hugging_face:
        if options.to != "torch_dist":
            raise ValueError(f"{source} is a Hugging Face model already; give --to torch_dist")
        _import(options)
    else:
        _from_checkpoint(options)
    return 0


def _is_empty(folder: Path, target: str) -> bool:
    """Whether a folder has nothing but the remains of a killed conversion to torch_dist, which the next one
    replaces."""
    names = {entry.name for entry in folder.iterdir()}
    if target != "torch_dist":
        return not names
    written = {name for name in names if not name.startswith(".iter_")}
    return not written or (FLAGS_FILE in written and written <= {*BESIDE, FLAGS_FILE})


# --- from Hugging Face ------------------------------------------------------------------------------------------------


def _import(options: argparse.Namespace) -> None:
    from megatron.trainer.arguments.hugging_face import model_of, read_config
    from megatron.trainer.checkpoint.conversion import write_checkpoint
    from megatron.trainer.checkpoint.hugging_face import HuggingFaceWeights

    source, output = options.source, options.output
    model = model_of(read_config(source), source / "config.json")
    architecture = model.family.architecture
    argv = [*model.argv(), "--make-vocab-size-divisible-by", str(options.make_vocab_size_divisible_by)]
    if architecture == "bert":  # the user names its vocabulary, with or without capitals
        pass
    elif any((source / name).is_file() for name in _TOKENIZERS):
        argv += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(output.absolute())]
    else:
        argv += ["--tokenizer-type", "NullTokenizer"]
    args = _completed(argv, architecture=architecture)
    weights = HuggingFaceWeights(source, model.model_type, args)
    precision = _precision(weights.dtype(next(iter(weights.tensors.values()))))
    if precision:
        argv += precision
        args = _completed(argv, architecture=architecture)
    output.mkdir(parents=True, exist_ok=True)
    try:
        with with_room(output):
            (output / FLAGS_FILE).write_text(_as_file(argv))
            _copy_beside(source, output)
            path = write_checkpoint(output, weights, list(weights.tensors.values()), args=args)
    except BaseException:
        for name in (FLAGS_FILE, *BESIDE):
            (output / name).unlink(missing_ok=True)
        raise
    print(f"wrote {path}; train it with @{output / FLAGS_FILE} --load {output}")


def _precision(dtype: object) -> list[str]:
    import torch

    return {torch.bfloat16: ["--bf16"], torch.float16: ["--fp16"]}.get(dtype, [])


def _as_file(argv: Sequence[str]) -> str:
    """A command line as a file of flags, one a line."""
    from megatron.trainer.arguments.flags.refusals import by_flag

    return "".join(f"{shlex.join([name, *values])}\n" for name, values in by_flag(argv))


def _completed(
    argv: Sequence[str], saved: argparse.Namespace | None = None, source: object = "", *, architecture: str = "gpt"
):
    """The configuration of a run with the model of these flags, or of a checkpoint's arguments. Raises ValueError."""
    from megatron.trainer.arguments import Platform, parse_args, resolve_platform, validate_args
    from megatron.trainer.arguments.flags.config import TrainConfig, padded_vocabulary
    from megatron.trainer.arguments.flags.parser import PROGRAMS
    from megatron.trainer.checkpoint.arguments import with_saved_arguments

    argv = [*argv, "--micro-batch-size", "1", "--skip-train", *_OF_PROGRAM[architecture]]
    args = parse_args(argv, prog="convert_checkpoint.py", defaults=PROGRAMS[architecture][1])
    if saved is not None:
        args = with_saved_arguments(args, saved, source, further=("bf16", "fp16"))
        if args.hybrid_layer_pattern:
            raise ValueError(
                f"{source} holds a HybridModel ({args.hybrid_layer_pattern}), whose weights have other names, and is "
                "not converted; train the GPT by --num-layers"
            )
    if architecture == "t5":
        args.encoder_seq_length = args.encoder_seq_length or _TOKENS_OF_T5
        args.decoder_seq_length = args.decoder_seq_length or _TOKENS_OF_T5
    elif args.seq_length is None:
        args.seq_length = args.max_position_embeddings
    validate_args(args, world_size=1)
    resolve_platform(args, Platform(is_cuda=False, has_transformer_engine=False, has_apex=False))
    if saved is not None:
        return TrainConfig.of(args)
    return TrainConfig.of(args, padded_vocab_size=padded_vocabulary(args, args.vocab_size))


# --- from a checkpoint ------------------------------------------------------------------------------------------------


def _from_checkpoint(options: argparse.Namespace) -> None:
    from dataclasses import replace

    from megatron.trainer.arguments.hugging_face import config_of, model_of, read_config
    from megatron.trainer.checkpoint.conversion import (
        CheckpointWeights,
        RankFilesWeights,
        write_checkpoint,
        write_hugging_face,
    )
    from megatron.trainer.checkpoint.directory import locate
    from megatron.trainer.checkpoint.loader import read_common_state
    from megatron.trainer.checkpoint.tensor_rows import tensors_of

    old = _old_format(options.source, options.ckpt_step)
    if old is not None:
        weights = RankFilesWeights(old)
        saved, path = weights.args, old
    else:
        location = locate(options.source, step=options.ckpt_step)
        if location is None:
            raise ValueError(f"{options.source} has neither config.json nor a checkpoint; name a folder that has one")
        saved, path = read_common_state(location).get("args"), location.path
    architecture = getattr(saved, "architecture", "gpt")
    if architecture not in _OF_PROGRAM:
        raise ValueError(f"{path} holds a model of the kind {architecture}, of which no Hugging Face model is made")
    args = _completed([], saved, path, architecture=architecture)
    given = None if options.config is None else read_config(options.config)
    args = replace(args, vocab_size=_vocabulary(options, args, given, path))
    config = config_of(args, dtype="float32", model_type=None if given is None else str(given.get("model_type")))
    if options.to == "flags":
        print(_as_file(model_of(config, path).argv()), end="")
        return
    tensors = list(tensors_of(config["model_type"], args))
    if old is not None:
        weights.require(iter(tensors))
    else:
        weights = CheckpointWeights(location, iter(tensors))
    if options.to == "torch_dist":
        if old is None:
            raise ValueError(f"{path} is a torch_dist checkpoint already; give --to hugging-face")
        options.output.mkdir(parents=True, exist_ok=True)
        with with_room(options.output):
            path = write_checkpoint(options.output, weights, tensors, args=args)
        print(f"wrote {path}")
        return
    config["torch_dtype"] = str(weights.dtype(tensors[0])).removeprefix("torch.")
    config = _described(options, config, given)
    with with_room(options.output), _whole(options.output) as partial:
        write_hugging_face(partial, weights, tensors, largest_file=int(options.max_shard_size * GIB))
        _copy_beside(options.config.parent if options.config else options.source, partial)
        (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    print(f"wrote {options.output}: {config['architectures'][0]}, vocabulary of {args.vocab_size}")


def _old_format(root: Path, step: int | None) -> Path | None:
    """The checkpoint of a directory, if it is in Megatron-LM's old format."""
    from megatron.trainer.checkpoint.directory import RELEASE, iteration_directory, read_tracker

    named = step if step is not None else read_tracker(root)
    if named is None:
        return None
    path = root / RELEASE if named == RELEASE else iteration_directory(root, named)
    return path if path.is_dir() and any(entry.name.startswith("mp_rank_") for entry in path.iterdir()) else None


def _vocabulary(options: argparse.Namespace, args: object, given: dict | None, path: Path) -> int:
    """Rows of the vocabulary without padding. Raises ValueError if their number is not known."""
    from megatron.trainer.arguments.hugging_face import model_of

    padded, size = args.padded_vocab_size, options.vocab_size
    if size is None and given is not None:
        size = model_of(given, options.config).facts["vocab_size"]
    if size is None and args.vocab_size is not None:
        size = args.vocab_size + args.vocab_extra_ids
    if size is None:
        raise ValueError(
            f"checkpoint {path} does not say how many of its {padded} tokens are padding; give --vocab-size, the size "
            "of the tokenizer"
        )
    if size > padded:
        raise ValueError(
            f"--vocab-size {size} is more than the {padded} rows of checkpoint {path}; give the tokenizer's size"
        )
    return size


def _described(options: argparse.Namespace, made: dict, given: dict | None) -> dict:
    """The configuration to write: that of --config, if it describes the checkpoint's model. Raises ValueError."""
    from megatron.trainer.arguments.hugging_face import QUANTIZATION, difference, model_of

    if given is None:
        return made
    here, there = model_of(made, "the checkpoint"), model_of(given, options.config)
    free = tuple(name for name in here.family.free if name != "mtp_num_layers")  # these layers have weights
    differs = difference(here.facts, there.facts, free)
    if differs:
        raise ValueError(
            f"--config {options.config} describes another model than the checkpoint: {differs}; leave it out"
        )
    dtype = {name: made["torch_dtype"] for name in ("dtype", "torch_dtype") if name in given}
    described = {"architectures": made["architectures"], **given, **(dtype or {"torch_dtype": made["torch_dtype"]})}
    return {key: value for key, value in described.items() if key != QUANTIZATION}  # weights are written unquantized


def _copy_beside(source: Path, folder: Path) -> None:
    """Copy the files that stay as they are."""
    for name in BESIDE:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


@contextlib.contextmanager
def _whole(output: Path) -> Iterator[Path]:
    """A folder that becomes `output` when it is complete; after an error nothing is left of it.

    A process that is killed leaves its folder, which the next conversion to `output` removes. A lock marks a folder
    that is still being written.
    """
    from megatron.elastic.cache.folder import try_lock, unlock_and_close

    output.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{output.name}.incomplete."
    for left in output.parent.glob(f"{glob.escape(prefix)}*"):
        try:
            lock = os.open(left, os.O_RDONLY)
        except FileNotFoundError:
            continue  # another conversion has just published or removed it
        if try_lock(lock, fcntl.LOCK_EX):
            shutil.rmtree(left, ignore_errors=True)
            unlock_and_close(lock)
        else:
            os.close(lock)
    partial = output.parent / f"{prefix}{secrets.token_hex(4)}"
    partial.mkdir()
    lock = os.open(partial, os.O_RDONLY)
    try_lock(lock, fcntl.LOCK_EX)
    try:
        yield partial
        _publish(partial, output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        unlock_and_close(lock)


def _publish(partial: Path, output: Path) -> None:
    """Make the files of a folder durable, then rename it to `output`."""
    for entry in partial.iterdir():
        with open(entry, "rb+") as stream:
            os.fsync(stream.fileno())
    os.rename(partial, output)  # onto an empty folder, or none
    descriptor = os.open(output.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    return command_line.run(convert, parse(argv))


if __name__ == "__main__":
    sys.exit(main())
