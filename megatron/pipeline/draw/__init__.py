"""Timelines as pictures (`draw_timeline`), as text for terminals (`timeline_text`), and small ones for pages
(`page.page_timeline`): three renderers of one `scene.Scene`."""

from megatron.pipeline.draw.figure import draw_timeline
from megatron.pipeline.draw.text import timeline_text

__all__ = ["draw_timeline", "timeline_text"]
