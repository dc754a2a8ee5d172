"""The floor: the rates that this card reaches with nothing but torch, beside which every other figure is read.

Matrix products in BF16, FP32, TF32 and FP8 of random numbers; copies on the card, to it and from it, and both ways at
once; what a launch costs the host, and how long the host waits for an empty kernel. A time is of wall clock between two
idle devices. Products are of n x n matrices, 2 n^3 operations each. A copy on the card reads and writes its bytes, and
both are counted.
"""

import statistics
import sys
from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu_hour.machine import clocks
from benchmarks.gpu_hour.result import Result, parser_of, seconds_of

REPEATS = 7


def products(device: str, size: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Name -> a product. FP8's is made last: a build or a card may not have it."""
    first, second = (torch.randn(size, size, device=device) for _ in range(2))

    def in_fp32(*, tf32: bool) -> torch.Tensor:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        return first @ second

    bf16 = first.bfloat16(), second.bfloat16()
    yield "bf16", lambda: bf16[0] @ bf16[1]
    yield "tf32", lambda: in_fp32(tf32=True)
    yield "fp32", lambda: in_fp32(tf32=False)
    fp8 = first.to(torch.float8_e4m3fn), second.to(torch.float8_e4m3fn).t().contiguous().t()
    scale = torch.ones((), device=device)
    yield "fp8", lambda: torch._scaled_mm(*fp8, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)


def measure_products(result: Result, device: str, size: int, count: int) -> None:
    for name, product in products(device, size):
        try:
            seconds = seconds_of(product, repeats=REPEATS, count=count)
        except (RuntimeError, NotImplementedError, ValueError) as error:  # torch's word for an unsupported type
            if name != "fp8":
                raise
            result.add(f"torch has no FP8 product here: {str(error).splitlines()[0]}")
            continue
        rates = [2 * size**3 / each for each in seconds]
        median, low, high = (each / 1e12 for each in (statistics.median(rates), min(rates), max(rates)))
        result.add(
            f"{name.upper()} products of {size} x {size}: {median:.4g} TFLOP/s ({low:.4g}-{high:.4g})",
            **{f"product_{name}_flop_per_second": rates},
        )
    if found := clocks():
        result.add(f"Clocks just after the products: {found}")


def copies(device: str, size: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """Name -> (bytes moved, the copy)."""
    on_card, other = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    pinned, back = (torch.empty(size, dtype=torch.uint8, pin_memory=device == "cuda").fill_(1) for _ in range(2))
    pageable = torch.ones(size, dtype=torch.uint8)
    found = {
        "on_the_card": (2 * size, lambda: other.copy_(on_card)),
        "to_the_card_pinned": (size, lambda: on_card.copy_(pinned, non_blocking=True)),
        "from_the_card_pinned": (size, lambda: back.copy_(on_card, non_blocking=True)),
        "to_the_card_pageable": (size, lambda: on_card.copy_(pageable)),
    }
    if device == "cuda":
        up, down = torch.cuda.Stream(), torch.cuda.Stream()

        def both() -> None:
            with torch.cuda.stream(up):
                on_card.copy_(pinned, non_blocking=True)
            with torch.cuda.stream(down):
                back.copy_(other, non_blocking=True)

        found["both_ways_at_once_pinned"] = (2 * size, both)
    return found


def measure_copies(result: Result, device: str, size: int, count: int) -> None:
    for name, (moved, copy) in copies(device, size).items():
        rates = [moved / each for each in seconds_of(copy, repeats=REPEATS, count=count)]
        median, low, high = (each / 1e9 for each in (statistics.median(rates), min(rates), max(rates)))
        result.add(
            f"Copies {name.replace('_', ' ')}, {size / 2**20:.4g} MiB each: {median:.4g} GB/s ({low:.4g}-{high:.4g})",
            **{f"copy_{name}_bytes_per_second": rates},
        )


def measure_launches(result: Result, device: str, count: int) -> None:
    """A kernel of one element: many behind one another, and one that the host waits for."""
    one = torch.zeros(1, device=device)
    behind = seconds_of(lambda: one.add_(1), repeats=REPEATS, count=count)
    waited = []
    for _ in range(count // 10):
        waited += seconds_of(lambda: one.add_(1), repeats=1)
    result.add(
        f"A launch behind others takes {1e6 * statistics.median(behind):.3g} us, "
        f"and one that the host waits for {1e6 * statistics.median(waited):.3g} us",
        launch_seconds=behind, launch_and_wait_seconds=waited,
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    args = parser_of(__doc__).parse_args(arguments)
    torch.manual_seed(1234)
    device = "cpu" if args.rehearse else "cuda"
    result = Result(args)
    measure_launches(result, device, 20 if args.rehearse else 2000)
    measure_products(result, device, 64 if args.rehearse else 8192, 1 if args.rehearse else 10)
    measure_copies(result, device, 1 << (16 if args.rehearse else 30), 1 if args.rehearse else 4)
    return 0


if __name__ == "__main__":
    sys.exit(main())
