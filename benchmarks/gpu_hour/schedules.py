"""Two and four stages on one card, through host memory, under every schedule: the losses of one process on the CPU.

It says nothing of speed: the stages take turns at the card. It runs the engine on the small models of the runtime's
tests, in their processes, beside the tests' own training loops in plain torch: flushing schedules against ordinary
training, 2bw against gradients of the version before, and predicted weights, PipeDream's and FTPipe's each against a
loop of its own. A rank that hangs is ended after a minute, with the stacks of all, and the next schedule runs.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from benchmarks.gpu_hour.result import Result, parser_of
from megatron.pipeline.program.edges import Edge
from megatron.pipeline.schedules.orders import PRESETS
from tests import workers
from tests.pipeline.runtime import graph_cases
from tests.pipeline.runtime.stages.module import provisional_reference, reference
from tests.pipeline.runtime.stages.module.reference import Training

TOLERANCE = 1e-4
"""Relative, of losses. CPU and GPU add up FP32 products in different orders."""
_MODULES = "tests.pipeline.runtime.stages.module.module_cases:run"
_RELAY = "tests.pipeline.runtime.relay.relay_cases:run"
_GRAPH = "tests.pipeline.runtime.graph_cases:run"
BATCHES = (4, 4, 8, 4, 4)
FLUSHED = Training(batches=BATCHES, clip_grad=0.05)


@dataclass(frozen=True)
class Comparison:
    """`name` on p ranks: the case that they run, with its options, and the losses that it has to have."""

    name: str
    case: str
    expected: Callable[[int], list[float]]
    options: Callable[[int], dict] = field(default=lambda p: {})


def run_on(of: str, case: str, options: dict) -> list[float]:
    """What each rank does: the losses of a case's batches. All ranks are on one card."""
    if of == "cuda":
        torch.cuda.set_device(0)
    module, _, name = case.partition(":")
    run = getattr(__import__(module, fromlist=[name]), name)
    outcome = run(**options, device="cuda:0" if of == "cuda" else "cpu", backend="gloo")
    return [report.losses["loss"] for report in outcome.reports]


def comparisons() -> list[Comparison]:
    found = [_of_preset(name) for name in PRESETS]
    predicted = Training(batches=BATCHES)
    found.append(
        Comparison(
            "2bw with predicted weights", _MODULES,
            lambda p: provisional_reference.train(predicted, provisional_reference.ByStage(p)).losses,
            lambda p: {"preset": "2bw", "predict": True, "training": predicted},
        )
    )  # fmt: skip
    found.append(
        Comparison(
            "async (FTPipe)", _GRAPH,
            lambda p: _losses(graph_cases.replayed(_chain(p), (2, 1, 3, 2), recompute=True)),
            lambda p: {"shape": _chain(p), "preset": "stale", "batches": (2, 1, 3, 2), "recompute": True},
        )
    )  # fmt: skip
    return found


def _of_preset(name: str) -> Comparison:
    preset = PRESETS[name]
    if name == "l2l":
        return Comparison(
            name, _RELAY, lambda p: reference.train(FLUSHED, delay=0).losses,
            lambda p: {"training": FLUSHED, "num_virtual_stages": reference.NUM_LAYERS // p, "stash": "host"},
        )  # fmt: skip
    if preset.weights == "stash":
        training = Training(batches=(1,) * 8)
        return Comparison(
            name, _MODULES, lambda p: reference.train_stash(training, num_stages=p).losses,
            lambda p: {"preset": name, "training": training},
        )  # fmt: skip
    options = {"preset": name, "training": FLUSHED, "moves_activations": preset.balance}
    options["num_virtual_stages"] = preset.virtual_stages or 2  # None: as many as the user likes
    delay = 1 if preset.weights == "2bw" else 0
    return Comparison(name, _MODULES, lambda p: reference.train(FLUSHED, delay=delay).losses, lambda p: options)


def _chain(num_ranks: int) -> graph_cases.Shape:
    """Two stages on each rank, dealt out in turn."""
    edges = tuple(Edge(first, second) for first, second in pairwise(range(2 * num_ranks)))
    return graph_cases.Shape(edges, (*range(num_ranks), *range(num_ranks)))


def _losses(outcome: graph_cases.Outcome) -> list[float]:
    return [report.losses["loss"] for report in outcome.reports]


def compare(comparison: Comparison, num_ranks: int, device: str) -> float:
    """The largest relative difference of a loss on any rank. Raises AssertionError for ranks that fail."""
    expected = comparison.expected(num_ranks)
    answers = workers.run(
        num_ranks, f"{__spec__.name}:run_on", timeout=60, device="cuda" if device == "cuda" else "cpu", of=device,
        case=comparison.case, options=comparison.options(num_ranks),
    )  # fmt: skip
    assert all(len(losses) == len(expected) for losses in answers), "a rank did not report every batch"
    return max(abs(mine / its - 1) for losses in answers for mine, its in zip(losses, expected, strict=True))


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args(arguments)
    result, device, failures = Result(args), "cpu" if args.rehearse else "cuda", 0
    for num_ranks in args.ranks:
        equal: dict[str, float] = {}
        for comparison in comparisons():
            name = f"{comparison.name}, {num_ranks} ranks"
            try:
                found = compare(comparison, num_ranks, device)
            except AssertionError as error:  # of a rank, with its traceback or the stacks
                failures += 1
                print(error, flush=True)
                result.add(f"FAILED: {name}: {_last_line(error)}")
                continue
            result.content["figures"][f"{name} largest relative difference of a loss"] = found
            if found < TOLERANCE:
                equal[comparison.name] = found
                result.write()
                print(f"{name}: losses within {found:.1e}", flush=True)
            else:
                failures += 1
                result.add(f"DIFFERENT: {name}: a loss is off by {found:.1e} of one process's")
        if equal:
            result.add(
                f"{num_ranks} ranks on one card have one process's losses, within {max(equal.values()):.0e}, under "
                f"{', '.join(equal)}"
            )
    workers.close_all()
    return 1 if failures else 0


def _last_line(error: AssertionError) -> str:
    return next((line for line in reversed(str(error).splitlines()) if line.strip()), "without a word")[:300]


if __name__ == "__main__":
    sys.exit(main())
