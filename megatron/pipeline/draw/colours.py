"""The colours of drawings: those of instructions, which their rows in `WORDS` name, and those of all other parts."""

from megatron.pipeline.program.instruction import Kind

COLOURS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "blue": (("#c6dcf4", "#8fb9e6", "#5b94d3", "#3873b8"), ("blue", "dodger_blue2", "deep_sky_blue4", "slate_blue1")),
    "green": (("#cde9c6", "#98d08c", "#66b35c", "#3d9140"), ("green4", "green", "dark_green", "chartreuse4")),
    "olive": (
        ("#e4efb4", "#cbdf7c", "#adc74d", "#8aa62c"), ("dark_cyan", "light_sea_green", "dark_turquoise", "turquoise4")
    ),
    "purple": (("#e2d3ee", "#c5a6de", "#a67bc9", "#8457ae"), ("purple", "magenta", "dark_violet", "medium_orchid")),
    "grey": (("#e0e0e0", "#c2c2c2", "#9b9b9b", "#757575"), ("grey37", "grey50", "grey30", "grey58")),
    "red": (("#c8102e",), ("red",)),
    "teal": (("#00727a",), ("dark_cyan",)),
    "pale teal": (("#63b5ba",), ("dark_cyan",)),
    "brick": (("#b3261e",), ("red",)),
    "navy": (("#1456a0",), ("blue",)),
    "sky": (("#8fb9e6",), ("blue",)),
    "steel": (("#3f6fa8",), ("blue",)),
    "leaf": (("#98d08c",), ("blue",)),
    "moss": (("#4b8a3d",), ("blue",)),
    "pink": (("#e9a3a3",), ("blue",)),
}  # fmt: skip
"""Name of a colour -> its shades in pictures, from the lightest, and its shades in a terminal, by rich's names.

Weight versions, or the stages of a rank, take the shades in turn."""

BUBBLE, EDGE, INK, LIGHT_INK = "#d9d9d9", "#ffffff", "#1a1a1a", "#ffffff"
HATCH, HATCHED, BORDER, CRITICAL = "#1f5c22", "#cde9c6", "#222222", "#a3009a"
TRANSFER, REDUCTION = "#555555", "#e58a00"
SAVED = ("#f2b66d", "#dd9437", "#bb741a", "#8f5510")  # for all stages of a rank, then for fewer and fewer
RESIDENT, FETCHED, ACCUMULATED, STORED = "#b9a3d6", "#e2d3ee", "#98d08c", "#dcefd7"
MEMORY = {  # by the part of a memory curve
    "optimizer": "#b9b9b9", "weights": "#7c97c4", "gradients": "#8dbb86", "activations": "#f2b66d",
    "deferred": "#cbdf7c", "transfers": "#c65b52",
}  # fmt: skip


def colour_of(kind: Kind, shade: int = 0) -> str:
    """The colour of a kind of instruction in pictures, as #rrggbb."""
    shades, _ = COLOURS[kind.row.colour]
    return shades[shade % len(shades)]


def terminal_colour_of(kind: Kind, shade: int = 0) -> str:
    """The colour of a kind of instruction in a terminal, by rich's name."""
    _, shades = COLOURS[kind.row.colour]
    return shades[shade % len(shades)]


def ink_on(shade: int) -> str:
    """The colour of text that is legible on a shade."""
    return LIGHT_INK if shade % 4 == 3 else INK
