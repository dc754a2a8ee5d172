"""A training command without what a search chooses, and with it.

Problem: a user describes a model by the flags of a training program, often those of a whole script. Some of them
(degrees, microbatch, schedule, recompute) are what the search is for; others (data, paths) do not matter yet.

Solution: a `Job` keeps the flags that stay, in their groups, and gives for every configuration the whole command line,
the namespace that the program's own rules make of it, and their refusal. No torch in here.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from megatron.planner import Architecture, Configuration
from megatron.planner.search.flags import configuration_words
from megatron.trainer.arguments import Platform, parse_args, resolve_platform, validate_args
from megatron.trainer.arguments.flags.parser import GROUPS
from megatron.trainer.arguments.flags.specification import Flag
from megatron.trainer.arguments.values import vocabulary
from megatron.trainer.plan import from_flags

PROGRAMS = {
    "gpt": ("pretrain_gpt.py", {}),
    "bert": ("pretrain_bert.py", {"architecture": "bert", "tokenizer_type": "BertWordPieceLowerCase"}),
}
"""By architecture: the program and its defaults."""

_PREDICTIONS = frozenset({
    "pipeline_2bw_provisional", "pipeline_2bw_provisional_microbatches", "pipeline_2bw_provisional_reduce",
})  # fmt: skip
CHOSEN_GROUPS = frozenset({"recompute", "dry run"})
CHOSEN = frozenset({
    "micro_batch_size", "global_batch_size", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
    "microbatch_group_size_per_virtual_pipeline_stage", "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "sequence_parallel",
    "rank_mapping", "rank_topology", "use_distributed_optimizer", "overlap_param_gather", "pipeline_schedule",
    "use_mp_args_from_checkpoint_args",
    "pipeline_extra_warmup", "pipeline_recompute", "balance_activations", "pipeline_2bw_single_gradient_buffer",
    "l2l_update", "l2l_resident_stages", "l2l_stash", "l2l_fetch",
    *_PREDICTIONS,
})  # fmt: skip
"""Destinations of flags that a configuration decides, or that only fit one."""

SOURCES = frozenset({
    "data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path", "per_split_data_args_path",
    "mock_data",
})  # fmt: skip
"""Destinations of flags that say which samples there are."""

_PLACES = frozenset({"data", "tokenizer", "checkpoint", "logging"})  # groups that say where things are
_SHAPE = frozenset({"vocab_size", "vocab_extra_ids", "tiktoken_num_special_tokens"})  # but for these


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, and how, whatever the configuration.

    Attributes:
        architecture: "gpt" or "bert".
        words: flags that stay, in the order of docs/flags.md.
        dropped: flags of the user that a configuration decides, as written.
        global_batch_size: the user's, or None.
        provisional, provisional_microbatches, provisional_reduce: how 2bw shall predict its weights.
        platform: the machines as the flags are checked for them.
    """

    architecture: str
    words: tuple[str, ...]
    dropped: tuple[str, ...]
    global_batch_size: int | None
    platform: Platform
    provisional: str = "off"
    provisional_microbatches: int | None = None
    provisional_reduce: bool = False

    @classmethod
    def read(cls, words: Sequence[str], *, architecture: str, platform: Platform) -> "Job":
        """A job from flags. Raises ValueError as the parser, and where the shape is incomplete."""
        program, defaults = PROGRAMS[architecture]
        given = parse_args(list(words), prog=program, defaults=defaults)
        if given.max_position_embeddings is None and given.seq_length is not None:
            words = [*words, "--max-position-embeddings", str(given.seq_length)]
            given = parse_args(words, prog=program, defaults=defaults)
        kept, dropped = [], []
        for group, flag in _flags():
            if flag.dest in given.given:
                if flag.dest in _PREDICTIONS and given.pipeline_2bw_provisional != "off":
                    continue
                chosen = flag.dest in CHOSEN or group in CHOSEN_GROUPS
                (dropped if chosen else kept).append(written(flag, given))
        job = cls(
            architecture=architecture,
            words=tuple(word for each in kept for word in each),
            dropped=tuple(" ".join(each) for each in dropped if each[:1] != ("--global-batch-size",)),
            global_batch_size=given.global_batch_size,
            platform=platform,
            provisional=given.pipeline_2bw_provisional,
            provisional_microbatches=given.pipeline_2bw_provisional_microbatches,
            provisional_reduce=given.pipeline_2bw_provisional_reduce,
        )
        assert job._alone  # so that what is wrong in any case is said at once
        return job

    @property
    def program(self) -> str:
        return PROGRAMS[self.architecture][0]

    # --- configurations

    def command(self, configuration: Configuration) -> list[str]:
        """All words after the program, what a run needs and the user has not said filled in."""
        topology = ("--rank-topology", "topology.yaml") if configuration.rank_mapping == "optimized" else ()
        return [*self.words, *self._stand_ins, *configuration_words(configuration), *topology]

    def arguments(self, configuration: Configuration) -> argparse.Namespace:
        """What the program's rules make of a configuration. Raises ValueError where they refuse it."""
        args = self._parsed(self.command(configuration))
        validate_args(args, world_size=configuration.num_gpus)
        resolve_platform(args, self.platform)
        args.padded_vocab_size = vocabulary.padded(args, vocabulary.assumed_size(args))
        return args

    def refusal(self, configuration: Configuration) -> str | None:
        """Why the program refuses a configuration: the first clause of what it says."""
        try:
            self.arguments(configuration)
        except ValueError as error:
            return str(error).split("; ")[0]
        return None

    def shape(self, tensor: int) -> Architecture:
        """The model, with the vocabulary padded for so many tensor ranks."""
        multiple = self._alone.make_vocab_size_divisible_by * tensor
        rows = -(-vocabulary.assumed_size(self._alone) // multiple) * multiple
        return replace(from_flags.architecture(self._alone), vocabulary_size=rows)

    @cached_property
    def software(self) -> from_flags.RunSoftware:
        return from_flags.software(self._alone)

    @property
    def clips_gradients(self) -> bool:
        return self._alone.clip_grad > 0

    @property
    def scales_loss(self) -> bool:
        return self._alone.fp16

    @property
    def vocab_size(self) -> int | None:
        """What --vocab-size says."""
        return self._given.vocab_size

    # --- words for a script

    def words_of(self, *groups: str) -> list[tuple[str, ...]]:
        """The flags that stay of these groups of docs/flags.md, a tuple each; without any: of all groups that do not
        say where things are."""
        return [
            _absolute(flag, written(flag, self._given), Path.cwd())
            for group, flag in _flags()
            if flag.dest in self._given.given and (group in groups if groups else _is_portable(group, flag))
        ]

    def gives(self, name: str) -> bool:
        """Whether the user gave this destination."""
        return name in self._given.given

    def placed_words_of(self, group: str, folder: Path) -> dict[str, tuple[str, ...]]:
        """By destination: the flags that stay of a group that says where things are, but for those of `words_of()`.
        Relative paths among them become absolute, seen from `folder`."""
        return {
            flag.dest: _absolute(flag, written(flag, self._given), folder)
            for title, flag in _flags()
            if title == group and flag.dest in self._given.given and not _is_portable(group, flag)
        }

    @property
    def has_data(self) -> bool:
        """Whether the user said which samples are trained on."""
        return any(getattr(self._given, name) for name in SOURCES - {"valid_data_path", "test_data_path"})

    @property
    def has_tokenizer(self) -> bool:
        """Whether the user's flags give a tokenizer, with the files that it needs."""
        given = self._given
        alone = given.tokenizer_type in ("NullTokenizer", "ByteLevelTokenizer") or given.tokenizer_model
        merges = given.merge_file or self.architecture == "bert"
        return bool(alone or (given.vocab_file and merges))

    # --- parts

    def _parsed(self, words: Sequence[str]) -> argparse.Namespace:
        program, defaults = PROGRAMS[self.architecture]
        return parse_args(list(words), prog=program, defaults=defaults)

    @cached_property
    def _given(self) -> argparse.Namespace:
        return self._parsed(self.words)

    @cached_property
    def _alone(self) -> argparse.Namespace:
        """The flags on one GPU, whatever the batch."""
        args = self._parsed(self.command(_SMALLEST))
        args.rampup_batch_size = args.step_batch_size_schedule = None
        validate_args(args, world_size=1)
        resolve_platform(args, self.platform)
        args.padded_vocab_size = vocabulary.padded(args, vocabulary.assumed_size(args))
        return args

    @cached_property
    def _stand_ins(self) -> tuple[str, ...]:
        """What the rules ask for and a search does not."""
        given, words = self._given, []
        if given.lr is None:
            words += ["--lr", "1e-4"]
        if given.train_iters is None and given.train_samples is None:
            words += ["--train-iters", "100000"]
        if not self.has_data:
            words += ["--data-path", "data"]
        if given.tokenizer_type is None and not (given.vocab_file and given.merge_file):
            words += ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "vocab", "--merge-file", "merges"]
        elif given.tokenizer_type in ("BertWordPieceLowerCase", "BertWordPieceCase") and given.vocab_file is None:
            words += ["--vocab-file", "vocab"]
        return tuple(words)


_SMALLEST = Configuration(micro_batch_size=1, global_batch_size=1)


def _flags() -> Iterable[tuple[str, Flag]]:
    return ((group.title, flag) for group in GROUPS for flag in group.flags)


def _is_portable(group: str, flag: Flag) -> bool:
    return group not in _PLACES or flag.dest in _SHAPE


def _absolute(flag: Flag, words: tuple[str, ...], folder: Path) -> tuple[str, ...]:
    """Words of a flag whose value is a path, with that path absolute."""
    name, *values = words
    if flag.metavar in ("DIR", "FILE"):
        values = [_seen_from(folder, value) for value in values]
    elif flag.metavar == "PREFIX":  # or a blend: weights and prefixes in turn
        is_blend = len(values) % 2 == 0 and all(map(_is_number, values[::2]))
        values = [
            value if is_blend and index % 2 == 0 else _seen_from(folder, value) for index, value in enumerate(values)
        ]
    elif flag.metavar == "PATH":  # of a tokenizer, whose name may be one that is no path
        values = [_seen_from(folder, value) if (folder / value).expanduser().exists() else value for value in values]
    return (name, *values)


def _seen_from(folder: Path, value: str) -> str:
    return str(folder / Path(value).expanduser()) if "$" not in value else value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def written(flag: Flag, args: argparse.Namespace) -> tuple[str, ...]:
    """A flag that was given, as words."""
    if flag.stores is not None:
        return (flag.name,)
    value = getattr(args, flag.dest, None)
    values = value if isinstance(value, (list, tuple)) else [value]
    return (flag.name, *map(str, values))
