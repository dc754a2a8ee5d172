"""Drawings of timelines: pictures, text for terminals, and small SVGs for HTML pages.

`draw_timeline`, `timeline_text` and `page.page_timeline` make them. All three render a `scene.Scene`.
"""

from megatron.pipeline.draw.figure import draw_timeline
from megatron.pipeline.draw.text import timeline_text

__all__ = ["draw_timeline", "timeline_text"]
