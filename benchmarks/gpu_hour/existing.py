"""Benchmarks that were there before the hour, with sizes for one card, and what they found as sentences.

python -m benchmarks.gpu_hour.existing one_rank --json one_rank.json
python -m benchmarks.gpu_hour.existing prediction_pass --json pass.json
"""

import argparse
import statistics
import sys
import warnings

from benchmarks import gpu, prediction_pass
from benchmarks.common.tables import spread
from benchmarks.gpu_hour.result import Result, parser_of

TINY_GPU = (
    "--rounds 1 --batches 1 --layers 1 --hidden-size 32 --heads 2 --seq-length 16 --micro-batch-size 2 "
    "--vocab-size 64 --microbatches 2"
)
CARD_GPU = "--rounds 5 --batches 4 --microbatches 4 8"


def one_rank(result: Result, *, rehearse: bool) -> None:
    """`gpu.py` with one stage, which on a GPU is one rank over NCCL."""
    args = gpu.parse(["--stages", "1", *(TINY_GPU if rehearse else CARD_GPU).split()])
    device, backend = ("cpu", "gloo") if rehearse else ("cuda", "nccl")
    found = gpu.measure(args, 1, backend, device=device)
    for row in gpu.rows_of(found, 1):
        m = row["microbatches"]
        speeds = ", ".join(f"{name} {speed:,.0f}" for name, speed in row["tokens_per_second"].items())
        ratios = "; ".join(f"{name} {spread(each, 3)}" for name, each in row["ratios"].items())
        figures = {f"{name} tokens_per_second, m={m}": speed for name, speed in row["tokens_per_second"].items()}
        figures |= {f"{name} ratio, m={m}": each for name, each in row["ratios"].items()}
        result.add(f"One stage, {m} microbatches: tokens/s {speeds}; {ratios}", **figures)
    peak = max(found["peak_bytes"])
    result.add(f"All three schedules together took {peak / 2**30:.1f} GiB", peak_bytes=peak)


def in_one_pass(result: Result, *, rehearse: bool) -> None:
    """`prediction_pass.py`: a billion parameters in 200 tensors."""
    parameters, layers, rounds = (4000, 4, 2) if rehearse else (1_000_000_000, 200, 10)
    block = prediction_pass.elementwise_step.BLOCK
    args = argparse.Namespace(
        parameters=parameters, layers=layers, rounds=rounds, blocks=[block], device="cpu" if rehearse else "cuda"
    )
    seconds = prediction_pass.measure(args)[block]
    times = ", ".join(f"{name} {spread([1e3 * each for each in found], 2)}" for name, found in seconds.items())
    ratios = [one / torch for one, torch in zip(seconds["one pass"], seconds["torch"], strict=True)]
    result.add(
        f"{parameters:,} parameters, milliseconds: {times}; one pass over torch's step {spread(ratios, 2)}",
        one_pass_over_torch_ratio=ratios, **{f"{name} seconds": found for name, found in seconds.items()},
    )  # fmt: skip
    rate = 8 * parameters / statistics.median(seconds["copy"])
    result.add(f"The copy beside it moves {rate / 1e9:.0f} GB/s", copy_bytes_per_second=rate)


BENCHMARKS = {"one_rank": one_rank, "prediction_pass": in_one_pass}


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("name", choices=BENCHMARKS)
    args = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS")
    BENCHMARKS[args.name](Result(args), rehearse=args.rehearse)
    return 0


if __name__ == "__main__":
    sys.exit(main())
