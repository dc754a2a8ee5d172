"""Measured configurations: the settings of their runs, the results, and the comparison with predictions.

A results file holds a JSON object a line, one for each configuration. When a result is added, the file is written anew,
in whole or not at all. So a measurement that was killed continues with the configurations that the file lacks.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from rich.markup import escape
from rich.table import Table

from megatron.documents.faults import shown
from megatron.documents.files import read_json, write_whole
from megatron.documents.picture import one_panel
from megatron.planner.job.cluster import Cluster
from megatron.planner.job.configuration import DEFAULTS, KINDS, SETTINGS, Configuration
from megatron.planner.planner import Planner
from megatron.planner.search.space import preset_of
from megatron.planner.time.iteration import simulated
from megatron.planner.time.profile import Profile
from megatron.planner.time.profiled import ProfiledCosts, shape_of
from megatron.trainer.arguments.flags.refusals import by_flag


class Settings(BaseModel):
    """The settings of a run.

    Attributes:
        flags: the flags of the training program, without those that a configuration decides.
        iterations, warmup: the number of trained iterations, and how many of them are not measured.
        threads: the threads of each rank in the operators of a CPU.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    flags: tuple[str, ...]
    iterations: int
    warmup: int
    threads: int

    def argv(self) -> tuple[str, ...]:
        """The settings as a command line, for `differences`."""
        own = {"--iterations": self.iterations, "--warmup": self.warmup, "--threads": self.threads}
        return (*self.flags, *(str(part) for pair in own.items() for part in pair))


def differences(known: Sequence[str], given: Sequence[str], *, but: frozenset[str] = frozenset()) -> str:
    """The differences of two command lines in words: `--hidden-size 64 and not 128`; empty if they agree.

    Args:
        known: flags and their values, which the words are about.
        given: the flags and values to compare with.
        but: flags that may differ.
    """
    first, second = ({flag: " ".join(values) for flag, values in by_flag(argv)} for argv in (known, given))
    told = []
    for flag in dict.fromkeys((*first, *second)):
        before, now = first.get(flag), second.get(flag)
        if before == now or flag in but:
            continue
        if before is None or now is None:
            told.append(f"{'no ' * (before is None)}{flag} {before if now is None else now}".rstrip())
        else:
            told.append(f"{flag} {before} and not {now}")
    return ", ".join(told)


@dataclass(frozen=True, kw_only=True)
class TrialEntry:
    """A configuration that is to be measured, and its predicted seconds of an iteration, if known."""

    configuration: Configuration
    predicted_seconds: float | None = None

    @property
    def name(self) -> str:
        """Unique, and good for a file: `t1-p2-d1-v1-b2-B16-none-2bw`."""
        parts = []
        for name, setting in SETTINGS.items():
            value = getattr(self.configuration, name)
            if setting.always or value != DEFAULTS[name]:
                parts.append(f"{setting.short or setting.word}{_text(value)}")
        return "-".join(parts)


def _text(value: object) -> str:
    """The text of a value in the name of a run; empty for a switch, whose word stands alone."""
    if value is True:
        return ""
    return ".".join(map(str, value)) if isinstance(value, tuple) else str(getattr(value, "value", value))


class Status(str, Enum):
    """How a run ended. `DONE`: it trained all iterations."""

    DONE = "done"
    OUT_OF_MEMORY = "out of memory"
    HANG = "hang"
    ERROR = "error"


class Result(BaseModel):
    """The result of one configuration.

    Attributes:
        name: the name of the entry.
        configuration: the fields of the configuration.
        settings: the settings of the run.
        predicted_seconds: the predicted seconds of an iteration.
        status: how the run ended.
        seconds, low, high: the median of the seconds of iterations behind the warm-up, and the two values between which
            eight of ten lie.
        num_iterations: the number of measured iterations.
        sentence: why the run failed.
        directory: the directory with its command, its log and its metrics.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str
    configuration: dict[str, bool | int | str | list[int] | None]
    settings: Settings
    predicted_seconds: float | None = None
    status: Status
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    num_iterations: int = 0
    sentence: str | None = None
    directory: str

    @property
    def error(self) -> float | None:
        """The error of the prediction, relative to the measured time; positive: the prediction is too long."""
        if self.seconds is None or self.predicted_seconds is None:
            return None
        return self.predicted_seconds / self.seconds - 1


def configuration_fields(configuration: Configuration) -> dict[str, bool | int | str | list[int] | None]:
    """The fields of a configuration as plain values, as in a file."""
    values = {name: getattr(value, "value", value) for name, value in asdict(configuration).items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def read_entries(path: str | Path) -> list[TrialEntry]:
    """The kept configurations of a JSONL file of a search, in the order of the file, which is by time.

    A line is a record of `search.table`. Raises ValueError naming the line.
    """
    entries = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = read_json(line)
            if not isinstance(record, dict):
                raise ValueError(f"it holds {shown(record)}, no object")
            if record["status"] == "rejected":
                continue
            values = {name: _typed(name, record[name]) for name in SETTINGS if name in record}
            values["schedule"], values["balance"] = preset_of(record["schedule"])
            values["layers"] = None if record.get("layers") is None else tuple(record["layers"])
            entry = TrialEntry(
                configuration=Configuration(**values), predicted_seconds=float(record["iteration_seconds"])
            )
        except KeyError as error:
            raise ValueError(
                f"{path}, line {number}: {error} is missing; write it with `grid_search.py search`"
            ) from error
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error}; write it with `grid_search.py search`") from error
        entries.append(entry)
    if not entries:
        raise ValueError(f"{path} has no configuration that was kept; search with other limits")
    return entries


def _typed(name: str, value: object) -> object:
    """The value of a field. Raises ValueError for a number in place of yes or no, and the other way round."""
    kind = KINDS[name]
    if kind in (int, bool) and type(value) is not kind:
        raise ValueError(f"{name} is {shown(value)}, {'true or false' if kind is bool else 'a whole number'} is wanted")
    return value


class ResultsFile:
    """Results by name, in a file. Raises ValueError for a file of anything else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._results: dict[str, Result] = {}
        if path.exists():
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                try:
                    result = Result.model_validate_json(line)
                except ValidationError as error:
                    raise ValueError(f"{path}, line {number} is no result ({error.errors()[0]['msg']}); remove it or "
                                     "name another directory") from error  # fmt: skip
                self._results[result.name] = result

    def get(self, name: str) -> Result | None:
        return self._results.get(name)

    def refuse_others(self, entries: Sequence[TrialEntry], settings: Settings) -> None:
        """Raise ValueError if an entry was run with other settings: its result says nothing about a run now."""
        for result in self.of(entries):
            told = differences(result.settings.argv(), settings.argv())
            if told:
                raise ValueError(f"{self._path} has {result.name} with {told}; give another --output, or remove it")

    def add(self, result: Result) -> None:
        """Write a result, in place of a result of the same name."""
        self._results[result.name] = result
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._path, "".join(f"{each.model_dump_json()}\n" for each in self._results.values()))

    def of(self, entries: Sequence[TrialEntry]) -> list[Result]:
        """The known results, in the order of the entries."""
        return [self._results[entry.name] for entry in entries if entry.name in self._results]


def table_of(results: Sequence[Result]) -> Table:
    """A table with a row for each result, the fastest first; failures last, with their sentence."""
    table = Table(title="seconds per iteration")
    for column in ("configuration", "predicted", "measured", "eight of ten", "predicted too long by", "ended"):
        table.add_column(column, justify="left" if column in ("configuration", "ended") else "right", overflow="fold")
    for each in sorted(results, key=lambda result: (result.status is not Status.DONE, result.seconds or 0.0)):
        done = each.status is Status.DONE
        table.add_row(
            each.name,
            "" if each.predicted_seconds is None else f"{each.predicted_seconds:.4g}",
            f"{each.seconds:.4g}" if done else "",
            f"{each.low:.4g}-{each.high:.4g}" if done else "",
            "" if each.error is None else f"{each.error:+.1%}",
            each.status.value if done else escape(f"{each.status.value}: {each.sentence}"),
        )
    return table


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw predicted against measured seconds, with the line on which both agree; the suffix chooses the format.

    Raises ValueError if no result has both.
    """
    both = [each for each in results if each.error is not None]
    if not both:
        raise ValueError("no configuration has both a prediction and a measured time; there is nothing to draw")
    with one_panel(path, 6.0, 5.5) as axes:
        for position, schedule in enumerate(dict.fromkeys(each.configuration["schedule"] for each in both)):
            those = [each for each in both if each.configuration["schedule"] == schedule]
            measured = [each.seconds for each in those]
            spread = [[each.seconds - each.low for each in those], [each.high - each.seconds for each in those]]
            axes.errorbar(
                measured, [each.predicted_seconds for each in those], xerr=spread, fmt="o", color=f"C{position}",
                elinewidth=0.8, capsize=2, label=schedule,
            )  # fmt: skip
        ends = [value for each in both for value in (each.seconds, each.predicted_seconds)]
        low, high = 0.9 * min(ends), 1.1 * max(ends)
        axes.plot([low, high], [low, high], color="0.4", linewidth=0.9)
        axes.fill_between(
            [low, high], [0.95 * low, 0.95 * high], [1.05 * low, 1.05 * high], color="0.9", label="within 5%"
        )
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)
        axes.set_xlabel("measured seconds per iteration (eight of ten)")
        axes.set_ylabel("predicted")


def predicted_seconds(profile: Profile, configuration: Configuration, *, num_layers: int) -> float:
    """Seconds of an iteration of the profile's model with `num_layers` layers. Raises ValueError if the profile lacks a
    time."""
    model = shape_of(profile, num_layers=num_layers, tensor=configuration.tensor)
    # A profile needs no facts of the cluster, since it was measured there.
    planner = Planner(model, Cluster(gpu="cpu", nodes=1, gpus_per_node=configuration.num_gpus))
    costs = ProfiledCosts(profile, model).costs(configuration, planner.layers(configuration))
    schedule = configuration.pipeline_schedule(tied_embeddings=model.shares_embedding)
    return simulated(costs, configuration, schedule).seconds
