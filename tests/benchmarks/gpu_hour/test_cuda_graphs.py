"""The part `cuda_graphs` as far as a CPU goes, and the order of calls of a capture."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from benchmarks.gpu_hour import cuda_graphs
from tests import workers

REHEARSE = "tests.benchmarks.gpu_hour.part_cases:rehearse"


@pytest.fixture(scope="module")
def found() -> dict:
    [found] = workers.run(1, REHEARSE, part="cuda_graphs")
    return found


@pytest.mark.full
@pytest.mark.parametrize("kind", ["megatron_core", "torch"])
def test_a_rehearsal_has_all_figures(found, kind):
    """Gradients are compared, three ways have times, and the line says that nothing was captured."""
    figures = found["figures"]
    assert figures[f"small_{kind}_largest_difference"] == 0.0
    for way in ("eager", "plain", "graph"):
        assert len(figures[f"small_{kind}_{way}_seconds"]) == 2 and min(figures[f"small_{kind}_{way}_seconds"]) > 0
    assert all("on this CPU the graph is a plain call" in line for line in found["lines"])


def test_a_capture_that_torch_refuses_is_said():
    """That, and a size without memory, are lines, and no figures."""
    [lines, figures] = workers.run(1, "tests.benchmarks.gpu_hour.test_cuda_graphs:_refused")[0]
    assert lines == [
        "small layers of megatron.core cannot be captured: operation not permitted when stream is capturing",
        "small layers of torch: out of memory, so there are no figures (CUDA out of memory.)",
    ]
    assert figures == {}


def _refused() -> tuple[list[str], dict]:
    from tests.benchmarks.gpu_hour.part_cases import rehearse

    refused = RuntimeError("operation not permitted when stream is capturing\nmore")
    errors = iter([refused, torch.OutOfMemoryError("CUDA out of memory.")])

    def refuse(microbatch):
        raise next(errors)

    with mock.patch.object(cuda_graphs, "captured", refuse):
        found = rehearse("cuda_graphs")
    return found["lines"], found["figures"]


def test_a_capture_comes_behind_a_warm_up_on_a_side_stream():
    """Three microbatches on another stream, which both streams wait for, then one under the capture, which other
    threads do not disturb; a replay computes no more on the host."""
    events = []
    side, main = mock.Mock(), mock.Mock()
    side.wait_stream.side_effect = lambda other: events.append("side waits")
    main.wait_stream.side_effect = lambda other: events.append("main waits")
    graph = mock.create_autospec(torch.cuda.CUDAGraph, instance=True)

    class Capture:
        __init__ = mock.create_autospec(torch.cuda.graph.__init__, return_value=None)

        def __enter__(self):
            events.append("capture")

        def __exit__(self, *error):
            events.append("captured")

    def stream(chosen):
        assert chosen is side
        return nullcontext()

    with (
        mock.patch("megatron.backend.is_cuda", lambda: True),
        mock.patch.multiple(
            torch.cuda, Stream=lambda: side, current_stream=lambda: main, stream=stream, CUDAGraph=lambda: graph,
            graph=Capture,
        ),
    ):  # fmt: skip
        replay = cuda_graphs.captured(lambda: events.append("microbatch"))
    assert events == ["side waits", *3 * ["microbatch"], "main waits", "capture", "microbatch", "captured"]
    assert Capture.__init__.call_args.kwargs == {"capture_error_mode": "thread_local"}
    replay()
    graph.replay.assert_called_once_with()
    assert events.count("microbatch") == 4
