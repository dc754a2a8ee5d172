"""Drawings of timelines: as pictures (`draw_timeline`), as text for terminals (`timeline_text`), and as small SVGs for
HTML pages (`page.page_timeline`). All three render a `scene.Scene`."""

from megatron.pipeline.draw.figure import draw_timeline
from megatron.pipeline.draw.text import timeline_text

__all__ = ["draw_timeline", "timeline_text"]
