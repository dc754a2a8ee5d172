"""A training command without the flags that a search chooses, and its completion for each configuration.

Problem: a user describes a model by the flags of a training program, often those of a whole script. Some of them
(degrees, microbatch, schedule, recompute) are chosen by the search; others (data, paths) do not matter to it.

Solution: a `Job` keeps the remaining flags, in their groups. For every configuration it gives the namespace that the
program's own rules make of the flags, or the reason why they refuse it. This module imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.pipeline.start_up.late_weights import take_error_feedback
from megatron.planner import Architecture, Configuration
from megatron.planner.job.configuration import SETTINGS
from megatron.planner.job.software import ALL_TO_ALL, FLEX
from megatron.trainer.arguments import Platform, parse_args, resolve_platform, validate_args
from megatron.trainer.arguments.flags import parser
from megatron.trainer.arguments.flags.config import TrainConfig, assumed_vocabulary, padded_vocabulary, usual_vocabulary
from megatron.trainer.arguments.flags.parser import FLAGS, GROUPS, destinations
from megatron.trainer.arguments.flags.specification import Arguments, Flag, Role
from megatron.trainer.arguments.rules import data, model, optimizer
from megatron.trainer.plan import from_flags
from megatron.trainer.plan.from_flags import DEGREES, PricedFlags, read_priced

SEARCHED = {architecture: parser.PROGRAMS[architecture] for architecture in ("gpt", "bert")}
"""The programs that a search supports, as in `parser.PROGRAMS`."""

SOURCES = frozenset(destinations(Role.SOURCE))
"""Destinations of flags that say which samples there are."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job without a configuration: the model, the data and how it is trained.

    Attributes:
        architecture: "gpt" or "bert".
        argv: the flags that do not depend on the configuration, in the order of docs/flags.md.
        dropped: the user's flags that a configuration decides, as written.
        global_batch_size: the user's value, or None.
        predictions: field of a configuration -> setting of 2bw's weight prediction; empty: no prediction.
        platform: the machines for which the flags are checked.
        priced: the user's settings for context parallelism and experts.
    """

    architecture: str
    argv: tuple[str, ...]
    dropped: tuple[str, ...]
    global_batch_size: int | None
    platform: Platform
    predictions: Mapping[str, Any] = field(default_factory=dict)
    priced: PricedFlags = field(default_factory=PricedFlags)

    @classmethod
    def read(cls, argv: Sequence[str], *, architecture: str, platform: Platform) -> "Job":
        """Read a job from flags, including flags that the program refuses and a search prices.

        Raises:
            ValueError: as the parser, or if the shape is incomplete.
        """
        program, defaults = SEARCHED[architecture]
        given = parse_args(list(argv), prog=program, defaults=defaults, accepts=Role.PRICED)
        if given.global_batch_size is not None and given.global_batch_size < 1:
            raise ValueError(f"--global-batch-size {given.global_batch_size} is below 1; give the sequences of a batch")
        if given.max_position_embeddings is None and given.seq_length is not None:
            argv = [*argv, "--max-position-embeddings", str(given.seq_length)]
            given = parse_args(argv, prog=program, defaults=defaults, accepts=Role.PRICED)
        take_error_feedback(given)
        predicts, kept, dropped, priced = given.pipeline_2bw_provisional != "off", [], [], []
        for flag in _given_flags(given):
            if Role.PRICED in flag.roles and (
                flag.refused or flag.ignored or flag.dest in DEGREES or getattr(given, flag.dest) == FLEX
            ):
                priced.append(flag)
                if getattr(given, flag.dest) != FLEX:
                    continue
            if Role.PREDICTION in flag.roles and predicts:
                continue
            (dropped if Role.CONFIGURATION in flag.roles else kept).append(_written(flag, given))
        if given.num_experts and "moe_token_dispatcher_type" not in given.given:
            kept.append(("--moe-token-dispatcher-type", ALL_TO_ALL))  # priced, unlike the program's default
        job = cls(
            architecture=architecture,
            argv=tuple(word for each in kept for word in each),
            dropped=tuple(" ".join(each) for each in dropped if each[:1] != ("--global-batch-size",)),
            global_batch_size=given.global_batch_size,
            platform=platform,
            predictions={
                name: getattr(given, dest)
                for name, setting in SETTINGS.items()
                if predicts and (dest := _DESTINATIONS.get(setting.flag)) in destinations(Role.PREDICTION)
            },
            priced=read_priced(given, priced, has_experts=bool(given.num_experts)),
        )
        assert job._alone  # report at once what is wrong in any configuration
        return job

    @property
    def program(self) -> str:
        return SEARCHED[self.architecture][0]

    # --- configurations

    def namespace(self, configuration: Configuration, **others: object) -> Arguments:
        """The program's parsed flags of the job and a configuration; `others`: values by destination.

        A search asks for thousands of configurations, so the job's flags are parsed once, and the configuration's
        values are set. A test shows that parsing the configuration's argv gives the same values.
        """
        flags = configuration.flags()
        if configuration.rank_mapping == "optimized":
            flags["--rank-topology"] = "topology.yaml"
        values = {_DESTINATIONS[name]: value for name, value in flags.items()}
        given = tuple(sorted({*self._whole.given, *values}))
        return Arguments(**{**vars(self._whole), **values, **others, "given": given})

    def arguments(self, configuration: Configuration) -> TrainConfig:
        """The validated configuration of the run. Raises ValueError where the program's rules refuse it."""
        return self._checked(self.namespace(configuration), world_size=configuration.num_gpus)

    def refusal(self, configuration: Configuration) -> str | None:
        """The first clause of the program's reason to refuse a configuration; None if it accepts it."""
        try:
            self.arguments(configuration)
        except ValueError as error:
            return str(error).split("; ")[0]
        return None

    def shape(self, tensor: int) -> Architecture:
        """The model, with the vocabulary padded for `tensor` tensor ranks."""
        rows = padded_vocabulary(
            replace(self._alone, tensor_model_parallel_size=tensor), assumed_vocabulary(self._alone)
        )
        return replace(from_flags.architecture(self._alone), vocabulary_size=rows)

    @property
    def has_experts(self) -> bool:
        return self._alone.num_experts is not None

    @cached_property
    def software(self) -> from_flags.RunSoftware:
        """The software that trains.

        If schedules that split backwards need other layers, its `with_halves` is the software with these layers.
        """
        asked = {name: getattr(self.priced, name) for name in ("gathers_keys", "dispatcher", "overlaps_experts")}
        whole = replace(from_flags.software(self._alone), **asked)
        if self._given.transformer_impl or self._alone.transformer_impl == "local" or self.platform.engine_puts_off:
            return whole
        return replace(whole, with_halves=from_flags.software(replace(self._alone, transformer_impl="local")))

    @property
    def fp8_recipe(self) -> str | None:
        """The FP8 recipe of the linear layers; None: they do not compute in FP8."""
        return None if self._alone.fp8 is None else self._alone.fp8_recipe

    @property
    def clips_gradients(self) -> bool:
        return self._alone.clip_grad > 0

    @property
    def scales_loss(self) -> bool:
        return self._alone.fp16

    @property
    def vocab_size(self) -> int | None:
        """The value of --vocab-size."""
        return self._given.vocab_size

    @property
    def usual_vocabulary(self) -> tuple[str, int]:
        """The name and the size of the vocabulary that is assumed without --vocab-size."""
        return usual_vocabulary(self._given)

    @property
    def accepted(self) -> tuple[str, ...]:
        """The user's flags that the programs accept and do not read, as written."""
        return tuple(
            " ".join(_written(flag, self._given))
            for flag in _given_flags(self._given)
            if (flag.ignored or flag.help.startswith("Accepted")) and Role.LOCATION not in flag.roles
        )

    # --- argv for a script

    def argv_of(self, *groups: str) -> list[tuple[str, ...]]:
        """The user's flags in these groups of docs/flags.md, one tuple each, except those that a configuration sets.

        Without groups: the flags of all groups, except those that say where files are.
        """
        return [
            _absolute(flag, _written(flag, self._given), Path.cwd())
            for flag in (self._given_of(*groups) if groups else _given_flags(self._given))
            if groups or Role.LOCATION not in flag.roles
        ]

    def gives(self, name: str) -> bool:
        """Whether the user gave the flag of this destination."""
        return name in self._given.given

    def located_argv_of(self, group: str, folder: Path) -> dict[str, tuple[str, ...]]:
        """Destination -> the user's flag, for the flags of `group` that say where files are.

        `argv_of()` leaves these flags out. Relative paths become absolute, relative to `folder`.
        """
        return {
            flag.dest: _absolute(flag, _written(flag, self._given), folder)
            for flag in self._given_of(group)
            if Role.LOCATION in flag.roles
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

    def _given_of(self, *titles: str) -> list[Flag]:
        groups = [group for group in GROUPS if group.title in titles]
        return [flag for group in groups for flag in group.flags if flag.dest in self._given.given]

    def _parsed(self, argv: Sequence[str]) -> Arguments:
        program, defaults = SEARCHED[self.architecture]
        return parse_args(list(argv), prog=program, defaults=defaults)

    @cached_property
    def _given(self) -> Arguments:
        return self._parsed(self.argv)

    @cached_property
    def _alone(self) -> TrainConfig:
        """The flags on one GPU, for any batch size."""
        args = self.namespace(_SMALLEST, rampup_batch_size=None, step_batch_size_schedule=None)
        return self._checked(args, world_size=1)

    def _checked(self, args: Arguments, *, world_size: int) -> TrainConfig:
        validate_args(args, world_size=world_size)
        resolve_platform(args, self.platform)
        return TrainConfig.of(args, padded_vocab_size=padded_vocabulary(args, assumed_vocabulary(args)))

    @cached_property
    def _whole(self) -> Arguments:
        """The remaining flags, and stand-ins for required flags that the user has not given."""
        return self._parsed([*self.argv, *self._stand_ins])

    @cached_property
    def _stand_ins(self) -> tuple[str, ...]:
        """Stand-ins for flags that the rules require and a search does not need."""
        given, argv = self._given, []
        if given.lr is None:
            argv += ["--lr", "1e-4"]
        if given.train_iters is None and given.train_samples is None:
            argv += ["--train-iters", "100000"]
        if not self.has_data:
            argv += ["--data-path", "data"]
        if given.tokenizer_type is None and not (given.vocab_file and given.merge_file):
            argv += ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "vocab", "--merge-file", "merges"]
        elif given.tokenizer_type in ("BertWordPieceLowerCase", "BertWordPieceCase") and given.vocab_file is None:
            argv += ["--vocab-file", "vocab"]
        return tuple(argv)


_SMALLEST = Configuration(micro_batch_size=1, global_batch_size=1)
_DESTINATIONS = {name: flag.dest for flag in FLAGS for name in flag.names}


def _absolute(flag: Flag, argv: tuple[str, ...], folder: Path) -> tuple[str, ...]:
    """A flag's words, with a path as its value made absolute."""
    name, *values = argv
    if flag.metavar in ("DIR", "FILE"):
        values = [_seen_from(folder, value) for value in values]
    elif flag.metavar == "PREFIX":  # or a blend: weights and prefixes in turn
        is_blend = len(values) % 2 == 0 and all(map(_is_number, values[::2]))
        values = [
            value if is_blend and index % 2 == 0 else _seen_from(folder, value) for index, value in enumerate(values)
        ]
    elif flag.metavar == "PATH":  # a tokenizer: its value may be a name that is no path
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


def _given_flags(args: Arguments) -> list[Flag]:
    """The flags that the command line named, in the order of docs/flags.md."""
    return [flag for flag in FLAGS if flag.dest in args.given]


def _written(flag: Flag, args: Arguments) -> tuple[str, ...]:
    """A given flag as argv."""
    if flag.stores is not None:
        return (flag.name,)
    value = getattr(args, flag.dest, None)
    values = value if isinstance(value, (list, tuple)) else [value]
    return (flag.name, *map(str, values))


# --- the flags of a script without the chosen flags -------------------------------------------------------------------


def model_argv(argv: Sequence[str], *, architecture: str) -> tuple[str, ...]:
    """The flags in `argv` that describe what is trained, in the order of docs/flags.md.

    Raises ValueError as `parse_args` does.
    """
    program, defaults = SEARCHED[architecture]
    args = parse_args(list(argv), prog=program, defaults=defaults)
    kept: list[str] = []
    for flag in _given_flags(args):
        if not flag.roles & (Role.CONFIGURATION | Role.SHORT_RUN):
            kept += _written(flag, args) if flag.stores in (None, getattr(args, flag.dest, None)) else ()
    return tuple(kept)


# --- missing flags ----------------------------------------------------------------------------------------------------

_RULES = (model.required, optimizer.learning_rate, data.data, data.text)


def missing_flags(argv: Sequence[str], *, architecture: str, iterations: int) -> list[str]:
    """A sentence for each rule that a run of `iterations` iterations would break, whatever its configuration.

    Raises ValueError as `parse_args` does.
    """
    program, defaults = SEARCHED[architecture]
    args = parse_args([*argv, "--micro-batch-size", "1", "--train-iters", str(iterations)], prog=program,
                      defaults=defaults)  # fmt: skip
    found = []
    for rule in _RULES:
        try:
            rule(args)
        except ValueError as error:
            found.append(str(error))
    return found
