"""Continue a prompt with a trained GPT.

    python tools/text_generation.py --load checkpoints --prompt "The function" --num-tokens 60
    echo "The function" | python tools/text_generation.py --load checkpoints --temperature 0.8 --top-p 0.9 --json

The arguments in the checkpoint determine the model and the tokenizer. The model may have been trained at any tensor and
pipeline parallel degree; one process loads all of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from megatron.documents.files import require_characters
from megatron.documents.flag_files import FlagFileParser

if TYPE_CHECKING:
    from megatron.trainer.arguments.flags.config import TrainConfig


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = FlagFileParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    model = parser.add_argument_group("model")
    model.add_argument("--load", required=True, metavar="DIR", help="directory of checkpoints")
    model.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load instead of the latest")
    for name, text in (
        ("--tokenizer-type", "kind of tokenizer instead of the checkpoint's"),
        ("--tokenizer-model", "tokenizer's file or directory instead of the one that the checkpoint names"),
        ("--vocab-file", "vocabulary file instead of the one that the checkpoint names"),
        ("--merge-file", "merges file instead of the one that the checkpoint names"),
    ):
        model.add_argument(name, metavar="VALUE", help=text)
    text = parser.add_argument_group("text")
    text.add_argument("--prompt", metavar="TEXT", help="text to continue; without it, standard input is read")
    text.add_argument("--num-tokens", type=int, default=100, metavar="N", help="tokens to generate at most")
    text.add_argument("--ignore-eod", action="store_true", help="go on after an end-of-document token")
    text.add_argument("--json", action="store_true", help="print one JSON object at the end instead of streaming text")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, default=1.0, metavar="X", help="0: always the likeliest token")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="draw among the K likeliest tokens; 0: all")
    sampling.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="draw among the likeliest that sum to P"
    )
    sampling.add_argument("--seed", type=int, default=1234, metavar="N", help="seed of the draws")
    options = parser.parse_args(argv)
    if options.num_tokens < 1:
        parser.error(f"--num-tokens {options.num_tokens} must be at least 1")
    if options.prompt is None and sys.stdin.isatty():
        parser.error("give --prompt TEXT, or the text on standard input")
    return options


def training_arguments(options: argparse.Namespace) -> TrainConfig:
    """The configuration of a training run on one rank with the checkpoint's model.

    Raises ValueError if the checkpoint or the flags cannot be used.
    """
    from megatron import backend

    backend.install()
    from megatron.trainer.arguments import parse_args, resolve_platform, validate_args
    from megatron.trainer.arguments.flags.config import TrainConfig
    from megatron.trainer.checkpoint import directory
    from megatron.trainer.checkpoint.checkpoint import with_checkpoint_arguments
    from megatron.trainer.start_up import initialize

    if directory.locate(options.load, step=options.ckpt_step) is None:
        raise ValueError(f"--load {options.load} holds no checkpoint; name the directory that a run had as its --save")
    argv = ["--load", options.load, "--finetune", "--use-checkpoint-args", "--skip-train", "--mock-data"]
    argv += ["--micro-batch-size", "1", "--seed", str(options.seed)]
    for name in ("ckpt_step", "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"):
        if (value := getattr(options, name)) is not None:
            argv += ["--" + name.replace("_", "-"), str(value)]
    args = parse_args(argv, prog="text_generation.py")
    args = with_checkpoint_arguments(args, further=("bf16", "fp16") if backend.is_cuda() else ())
    validate_args(args, world_size=1)
    resolve_platform(args, initialize.this_platform())
    return TrainConfig.of(args)


def load_model(args: TrainConfig) -> tuple:
    """Load the model in evaluation mode. Returns the model, the tokenizer, and the number of ids that may be drawn.

    Raises ValueError if the checkpoint or the tokenizer cannot be loaded.
    """
    from megatron.core.utils import unwrap_model
    from megatron.pipeline.runtime.stages.megatron.auxiliary import predict_next_token_only
    from megatron.trainer.checkpoint.checkpoint import RunParts, load_checkpoint
    from megatron.trainer.data.tokenizer import build_tokenizer, vocab_size
    from megatron.trainer.models import core_config
    from megatron.trainer.models.gpt import build_chunks, gpt_model
    from megatron.trainer.start_up import initialize

    args = initialize.initialize(args)
    tokenizer = build_tokenizer(args)

    def provider_of(model_config):
        return lambda pre, post: gpt_model(args, model_config, pre_process=pre, post_process=post)

    chunks = build_chunks(provider_of, core_config.transformer_config(args))
    load_checkpoint(RunParts(chunks), args=args)
    predict_next_token_only(unwrap_model(chunks[0]))
    return chunks[0].eval(), tokenizer, min(vocab_size(args, tokenizer), args.padded_vocab_size)


def pieces(tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of each token as soon as it is known.

    A character that consists of several tokens is yielded with the last of these tokens. An id that the tokenizer
    cannot decode, because the model's vocabulary is larger, is yielded as <|id|>.
    """
    seen, text = [], ""
    for token in tokens:
        if not _decodes(tokenizer, token):
            yield tokenizer.detokenize(seen)[len(text) :] + f"<|{token}|>"
            seen, text = [], ""
            continue
        seen.append(token)
        whole = tokenizer.detokenize(seen)
        if not whole.endswith("\ufffd"):
            yield whole[len(text) :]
            text = whole
    yield tokenizer.detokenize(seen)[len(text) :]


def _decodes(tokenizer, token: int) -> bool:
    try:
        tokenizer.detokenize([token])
    except (ValueError, IndexError, KeyError, OverflowError):
        return False
    return True


def generate(options: argparse.Namespace) -> int:
    """Load the model, generate and print. Returns the exit status. Raises ValueError for an error of the user."""
    prompt = _read() if options.prompt is None else options.prompt
    require_characters(prompt, "the prompt")
    args = training_arguments(options)
    from megatron.trainer.start_up.initialize import left_in_order

    with left_in_order():
        _generate(args, options, prompt)
    return 0


def _read() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is no UTF-8 text ({error.reason}); convert it") from error


def _prompt_ids(tokenizer, prompt: str) -> list[int]:
    """The prompt's tokens; of an empty one the end-of-document token, if there is any."""
    end = getattr(tokenizer, "eod", None)
    try:
        ids = list(tokenizer.tokenize(prompt)) if prompt else []
    except Exception as error:  # each tokenizer library raises errors of its own classes
        reason = str(error) or type(error).__name__
        raise ValueError(f"the prompt cannot be tokenized: {reason}; give one that the tokenizer can read") from error
    return ids or ([] if end is None else [end])


def _generate(args: TrainConfig, options: argparse.Namespace, prompt: str) -> None:
    from megatron import backend
    from megatron.trainer.models.generation import Sampling, TextGenerator

    sampling = Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    model, tokenizer, vocab_size = load_model(args)
    generator = TextGenerator(
        model, num_positions=args.max_position_embeddings, vocab_size=vocab_size, device=backend.device()
    )
    end = getattr(tokenizer, "eod", None)
    prompt_ids = _prompt_ids(tokenizer, prompt)
    generated: list[int] = []

    def tokens() -> Iterator[int]:
        for token in generator.stream(prompt_ids, options.num_tokens, sampling, seed=options.seed):
            if token == end and not options.ignore_eod:
                return
            generated.append(token)
            yield token

    if options.json:
        text = "".join(pieces(tokenizer, tokens()))
        stopped = "length" if len(generated) == options.num_tokens else "end of document"
        result = {"prompt": prompt, "text": text, "tokens": generated, "stopped": stopped}
        print(json.dumps(result, ensure_ascii=False))
    else:
        print(prompt, end="", flush=True)
        for piece in pieces(tokenizer, tokens()):
            print(piece, end="", flush=True)
        print()


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, 130 after Ctrl-C, or 2 with one sentence on standard error."""
    options = parse(argv)
    try:
        return generate(options)
    except ValueError as error:
        sys.stderr.write(f"text_generation.py: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
