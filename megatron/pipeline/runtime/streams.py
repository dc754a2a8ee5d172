"""Waiting for a CUDA device from a background thread."""

from __future__ import annotations

import torch


def finish_stream(device: torch.device) -> None:
    """Until a CUDA device has done all that this thread has given its current stream; the host sleeps meanwhile."""
    if device.type == "cuda":
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        event.synchronize()
