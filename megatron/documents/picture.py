"""Pictures drawn by matplotlib, and written in the format of the file's suffix.

The import of matplotlib takes longer than all else that a command does, so only functions that draw import it.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.documents.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def new_figure(width: float, height: float, **options: object) -> "Figure":
    """Make a white figure, which needs no screen. `width`, `height`: inches. `options`: arguments for matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white", **options)
    FigureCanvasAgg(figure)
    return figure


def require_picture(path: Path) -> None:
    """Raise ValueError if the suffix of `path` is not a picture format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    if path.suffix.lstrip(".").lower() not in FigureCanvasAgg.get_supported_filetypes():
        raise ValueError(f"{path} is no image that can be written; end its name in .png or .svg")


def save(figure: "Figure", path: Path, *, dpi: int = 150) -> None:
    """Write a figure, and make its folder if the folder is missing. The same picture gives the same bytes.

    Raises ValueError if the suffix of `path` is not a picture format.
    """
    import matplotlib

    require_picture(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "picture"}):
        kind, stream = path.suffix.lower().removeprefix("."), io.BytesIO()
        figure.savefig(stream, format=kind, dpi=dpi, metadata={"Date": None} if kind == "svg" else None)
    write_whole(path, stream.getvalue())


@contextmanager
def one_panel(path: Path, width: float, height: float, *, title: str = "") -> "Iterator[Axes]":
    """A block that draws on the axes it is given. At its end a missing legend is added, and the picture is written."""
    figure = new_figure(width, height, layout="constrained")
    axes = figure.add_subplot()
    yield axes
    axes.set_title(title)
    if axes.get_legend() is None:
        axes.legend()
    save(figure, path)


def as_png(figure: "Figure") -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=140)
    return stream.getvalue()


def as_svg(figure: "Figure", *, salt: str, themed: bool = False) -> str:
    """The figure as an SVG element for a page, without an XML header and with text as text.

    Args:
        salt: a text that makes the element's ids unique within a page.
        themed: whether the figure is transparent, with the page's text colour in place of black; the page must set the
            fill of texts.
    """
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure.savefig(
            stream, format="svg", transparent=themed, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    text = stream.getvalue()
    element = text[text.index("<svg") :]
    return element.replace("#000000", "currentColor") if themed else element
