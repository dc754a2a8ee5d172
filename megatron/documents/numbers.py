"""Numbers in sentences."""


def counted(number: int, noun: str) -> str:
    """`1 stage`, `2 stages`, `3 microbatches`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"
