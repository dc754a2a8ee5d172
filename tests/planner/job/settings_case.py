"""Run by test_settings.py in a process of its own, whose configurations have two fields more."""

import importlib.abc
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

MODULE = "megatron.planner.job.configuration"
SOURCE = Path(__file__).resolve().parents[3] / "megatron" / "planner" / "job" / "configuration.py"
LAST_FIELD, LAST_CHOSEN = (
    'expert_tensor: Annotated[int | None, Setting(flag="--expert-tensor-parallel-size", word="etp")] = None\n',
    '"expert_tensor",\n)',
)
MORE_FIELDS = (
    '    rinses: Annotated[bool, Setting(flag="--rinse", word="rinsed", remark="rinsed weights")] = False\n'
    '    soap: Annotated[int, Setting(flag="--soap", variable="SOAP", word="soap")] = 0\n'
)


class _Changed(importlib.abc.MetaPathFinder):
    """Loads one module from another file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def find_spec(self, name: str, *_: object) -> object:
        return importlib.util.spec_from_file_location(name, self._path) if name == MODULE else None


def change(path: Path) -> None:
    """Add the fields to the table of settings, in this process."""
    text = SOURCE.read_text(encoding="utf-8")
    assert text.count(LAST_FIELD) == text.count(LAST_CHOSEN) == 1 and MODULE not in sys.modules
    text = text.replace(LAST_FIELD, LAST_FIELD + MORE_FIELDS)
    path.write_text(text.replace(LAST_CHOSEN, f'"rinses", "soap", {LAST_CHOSEN}'), encoding="utf-8")
    sys.meta_path.insert(0, _Changed(path))


def seen(folder: Path) -> dict:
    """Where the fields of a search's best show."""
    from megatron.commands.grid_search.measure import _configuration
    from megatron.commands.grid_search.search_script import script_text
    from megatron.commands.grid_search.trial_results import TrialEntry, configuration_fields, read_entries
    from megatron.planner import Architecture
    from megatron.planner.search.report import html_report
    from megatron.planner.search.table import records, write_csv, write_jsonl
    from megatron.trainer.arguments import Platform
    from megatron.trainer.plan.command import Job
    from megatron.trainer.plan.from_flags import software
    from tests.planner.search import helper

    model = Architecture.gpt3(
        num_layers=4, hidden_size=512, num_attention_heads=8, sequence_length=512, vocabulary_size=4096
    )
    cluster = helper.a100(1)
    found = helper.run(model, cluster, global_batch_size=32, schedules=("flush",), pipeline=(2,), tensor=(2,))
    configuration = replace(found.best.estimate.configuration, rinses=True, soap=3)
    best = replace(
        found.best, choice=replace(found.best.choice, rinses=True, soap=3),
        estimate=replace(found.best.estimate, configuration=configuration),
    )  # fmt: skip
    outcome = replace(found, kept=(best,))
    write_csv(outcome, folder / "found.csv")
    write_jsonl(outcome, folder / "found.jsonl")
    platform = Platform(is_cuda=True, has_transformer_engine=True, has_apex=True)
    words = "--bf16 --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --vocab-size 4096"
    job = Job.read(words.split(), architecture="gpt", platform=platform)
    priced = replace(best, software=software(job._alone))
    (entry,) = read_entries(folder / "found.jsonl")
    planner = helper.planner(model, cluster, helper.PAPER)
    given = _configuration("micro_batch_size=1,global_batch_size=2,rinses=true,soap=4")
    return {
        "flags": configuration.argv("rinses", "soap"),
        "name": TrialEntry(configuration=configuration).name,
        "records": [{name: each.get(name) for name in ("status", "rinses", "soap")} for each in records(outcome)],
        "csv": (folder / "found.csv").read_text().splitlines()[:2],
        "read": [entry.configuration.rinses, entry.configuration.soap],
        "written": configuration_fields(configuration),
        "given": [given.rinses, given.soap],
        "page": html_report(outcome, lambda _: planner, title="", summary=(), num_timelines=0),
        "script": script_text(job, priced, cluster, command="search"),
    }


if __name__ == "__main__":
    change(Path(sys.argv[1]) / "configuration.py")
    print(json.dumps(seen(Path(sys.argv[1]))))
