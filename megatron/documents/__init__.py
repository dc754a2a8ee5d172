"""Users' files, command lines, tables and pictures. Errors are one sentence; a file is written whole or not at all."""

GIB = 2**30


def counted(number: int, noun: str) -> str:
    """A number with its noun in the singular or plural: `1 stage`, `2 stages`, `3 microbatches`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"
