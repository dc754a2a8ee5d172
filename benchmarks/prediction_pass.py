"""A step and a prediction in one pass: the time of the pass alone, for one stage's parameters.

    python benchmarks/prediction_pass.py                      # a minute, one thread; a table
    python benchmarks/prediction_pass.py --blocks 8192 16384  # other blocks of the passes on a CPU, in elements
    python benchmarks/prediction_pass.py --kernel fused       # with torch's fused kernel
    python benchmarks/prediction_pass.py --device cuda --parameters 1000000000 --layers 200  # Triton's kernel, on a GPU

torch's AdamW, FP32, with moments. `torch` is the optimizer's own step, `pass` the same step in blocks that stay in the
cache, or on a GPU by the kernel. With a prediction behind it: `torch, prediction` takes the two one after the other,
`one pass` together. `copy` copies as many FP32 numbers as there are parameters, which tells how fast this machine's
memory is: it moves 8 bytes a parameter. All take turns in each round. Figures are medians (least-greatest) in
milliseconds.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.results import parser_of, set_environment, write
from benchmarks.common.tables import spread, terminal
from megatron import backend
from megatron.pipeline.runtime.update import elementwise_step
from megatron.pipeline.runtime.update.provisional_step import ProvisionalStep


def ways(num_parameters: int, num_layers: int, device: str, kernel: str) -> dict[str, Callable[[], None]]:
    """Name -> what is timed."""
    size = num_parameters // num_layers
    parameters = [torch.randn(size, device=device, requires_grad=True) for _ in range(num_layers)]
    gradients = {each: torch.randn_like(each) for each in parameters}
    targets = {each: torch.empty_like(each) for each in parameters}
    for each in parameters:
        each.grad = torch.randn_like(each)
    fused = True if kernel == "fused" else None
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01, fused=fused)
    optimizer.step()
    provisional = ProvisionalStep(optimizer)

    def both(*, puts_off: bool) -> None:
        provisional.step(puts_off=puts_off)
        provisional.take(lambda each: (gradients[each], 1.0), targets.__getitem__)

    def in_a_pass() -> None:
        provisional.step(puts_off=True)
        provisional.finish()

    def copy() -> None:
        for each, target in targets.items():
            target.copy_(gradients[each])

    return {
        "copy": copy, "torch": optimizer.step, "pass": in_a_pass,
        "torch, prediction": lambda: both(puts_off=False), "one pass": lambda: both(puts_off=True),
    }  # fmt: skip


def measure(args) -> dict[int, dict[str, list[float]]]:
    """Block -> name -> seconds of each round. The first round is not timed."""
    found = {
        block: {name: [] for name in ways(args.layers, args.layers, args.device, args.kernel)} for block in args.blocks
    }
    timed = ways(args.parameters, args.layers, args.device, args.kernel)
    for number in range(args.rounds + 1):
        for block, seconds in found.items():
            elementwise_step.BLOCK = block
            for name, call in timed.items():
                backend.synchronize()
                start = time.perf_counter()
                call()
                backend.synchronize()
                if number:
                    seconds[name].append(time.perf_counter() - start)
    return found


def main() -> None:
    parser = parser_of(__doc__, json="file for every measured time")
    parser.add_argument("--parameters", type=int, default=13_000_000)
    parser.add_argument("--layers", type=int, default=20, help="tensors of equal size that hold the parameters")
    parser.add_argument("--blocks", type=int, nargs="+", default=[elementwise_step.BLOCK])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kernel", choices=("loop", "fused"), default="loop", help="torch's, which takes the steps")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    set_environment()
    torch.set_num_threads(1)
    backend.keep_freed_memory()  # as in training; else a step's temporary tensors cost page faults
    found = measure(args)
    table = Table(
        title=f"{args.parameters:,} parameters, {args.layers} tensors, {args.device}, {args.kernel}: milliseconds"
    )
    for column in ("block", *next(iter(found.values())), "one pass over torch"):
        table.add_column(column, justify="right")
    for block, seconds in found.items():
        cells = [spread([1e3 * second for second in each], 1) for each in seconds.values()]
        ratio = statistics.median(a / b for a, b in zip(seconds["one pass"], seconds["torch"], strict=True))
        table.add_row(f"{block:,}", *cells, f"{ratio:.2f}")
    console = terminal()
    console.print(table)
    copies = [each for seconds in found.values() for each in seconds["copy"]]
    console.print(f"memory: {8 * args.parameters / statistics.median(copies) / 1e9:.1f} GB/s")
    write(args.json, {"settings": vars(args), "seconds": found})


if __name__ == "__main__":
    main()
