"""Writes `docs/flags.md` from the flag records: `python -m megatron.trainer.arguments.reference > docs/flags.md`."""

import sys

from megatron.trainer.arguments.flags.parser import GROUPS, describe_default
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
    text = (flag.refused or flag.help).replace("|", "\\|")
    return f"| {names} | {values} | {describe_default(flag)} | {text} |"


def _idle(row: Idle) -> str:
    names = ", ".join(f"`{FLAG_OF[name].name}`" for name in row.names.split())
    return f"| {names} | {row.reason} |"


def render() -> str:
    """The page as Markdown."""
    lines = [
        "# Flags",
        "",
        "Names, meanings and defaults are Megatron-LM's where it has the flag. This page is generated from",
        "`megatron/trainer/arguments` by `python -m megatron.trainer.arguments.reference > docs/flags.md`.",
        "",
        "Flags may stand in a file, which `@FILE` names among the others: one or several a line, quoted as in a shell,",
        "with comments behind `#`. So it is for all training programs, and for the tools that plan and profile.",
        "",
    ]
    for group in GROUPS:
        lines += [
            f"## {group.title.capitalize()}",
            "",
            group.description,
            "",
            "| flag | value | default | meaning |",
            "|---|---|---|---|",
        ]
        lines += [_row(flag) for flag in group.flags] + [""]
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


if __name__ == "__main__":
    sys.stdout.write(render())
