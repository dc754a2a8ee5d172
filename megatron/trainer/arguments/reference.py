"""The generator of the documentation pages of flags: `python -m megatron.trainer.arguments.reference docs`."""

import sys
from collections.abc import Iterator
from pathlib import Path

from megatron.trainer.arguments.flags import refusals
from megatron.trainer.arguments.flags.parser import FLAGS, GROUPS, describe_default
from megatron.trainer.arguments.flags.specification import Flag
from megatron.trainer.arguments.rules.without_effect import FLAG_OF, ROWS, Idle


def _row(flag: Flag) -> str:
    names = ", ".join(f"`{name}`" for name in flag.names)
    values = ""
    if flag.choices:
        values = ", ".join(f"`{choice}`" for choice in flag.choices)
    elif flag.stores is None:
        values = {"integer": "whole number", "number": "number"}.get(getattr(flag.type, "__name__", ""), "text")
        if flag.nargs is not None:
            values += " (several)"
    return f"| {names} | {values} | {describe_default(flag)} | {_cell(flag.help)} |"


def _idle(row: Idle) -> str:
    names = ", ".join(f"`{FLAG_OF[name].name}`" for name in row.names.split())
    return f"| {names} | {row.reason} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def flags() -> str:
    """The page of the supported flags, as Markdown."""
    lines = [
        "# Flags",
        "",
        "Names, meanings and defaults are Megatron-LM's where it has the flag. What becomes of its other flags is on",
        "[a page of its own](megatron_lm_flags.md). Both pages are generated from `megatron/trainer/arguments` by",
        "`python -m megatron.trainer.arguments.reference docs`.",
        "",
        "Flags may stand in a file, which `@FILE` names among the others: one or several a line, quoted as in a shell,",
        "with comments behind `#`. So it is for all training programs, and for the tools that plan and profile.",
        "",
    ]
    for group in GROUPS:
        taken = [flag for flag in group.flags if not (flag.refused or flag.ignored)]
        if not taken:
            continue
        lines += [
            f"## {group.title.capitalize()}",
            "",
            group.description,
            "",
            "| flag | value | default | meaning |",
            "|---|---|---|---|",
        ]
        lines += [_row(flag) for flag in taken] + [""]
    lines += [
        "## Without effect beside others",
        "",
        "Where one of these is given and nothing comes of it, the run says so at its start, with the reason.",
        "",
        "| flags | reason |",
        "|---|---|",
    ]
    lines += [_idle(row) for row in ROWS] + [""]
    return "\n".join(lines)


def of_megatron_lm() -> str:
    """The page of Megatron-LM's unsupported flags, as Markdown: one row for each reason."""
    lines = [
        "# Megatron-LM's flags",
        "",
        "A command line of Megatron-LM works here as it stands but for the flags of this page; all others of",
        "core_v0.16.1 to core_v0.20 are [taken](flags.md). Flags that would change what is trained are refused, all in",
        "one message, which says what to do about each. Flags about logging, speed and what does not exist here are",
        "accepted, and the run says once that they have no effect. A value that is Megatron-LM's default asks for",
        "nothing and passes.",
        "",
        "## Refused",
        "",
        "| flags | why, and what to do |",
        "|---|---|",
        *_by_reason(refused=True),
        "",
        "## Without effect",
        "",
        "| flags | why |",
        "|---|---|",
        *_by_reason(refused=False),
        "",
    ]
    return "\n".join(lines)


def _by_reason(*, refused: bool) -> Iterator[str]:
    flags: dict[str, list[str]] = {}
    for flag in FLAGS:
        if reason := flag.refused if refused else flag.ignored:
            flags.setdefault(reason, []).append(flag.name)
    for flag in refusals.table().values():
        if flag.refused == refused:
            flags.setdefault(flag.reason, []).append(flag.name)
    for reason, names in flags.items():
        yield f"| {', '.join(f'`{name}`' for name in names)} | {_cell(reason)} |"


PAGES = {"flags.md": flags, "megatron_lm_flags.md": of_megatron_lm}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (Path(sys.argv[1]) / name).write_text(page(), encoding="utf-8")
