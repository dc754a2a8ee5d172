"""Train a small model of plain torch as a pipeline, with any schedule. Nothing here is this project's but `Pipeline`.

    pip install .    # once, in the checkout
    torchrun --nproc-per-node 2 examples/library/train.py --schedule 2bw
    torchrun --nproc-per-node 2 examples/library/train.py --schedule interleaved --modules-per-rank 2
    torchrun --nproc-per-node 2 examples/library/train.py --schedule my_program.csv
    torchrun --nproc-per-node 2 examples/library/train.py --schedule 2bw --save state --steps 20
    torchrun --nproc-per-node 2 examples/library/train.py --schedule 2bw --load state --steps 40    # goes on at step 21

The model learns to name the sum of two digits, modulo 10. Each rank makes the layers of its own stages, which begin
alike on any number of ranks. On GPUs each rank takes one of its own, and NCCL carries the tensors.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megatron.pipeline import Pipeline

WIDTH, LAYERS = 64, 8


class Embed(nn.Embedding):
    def forward(self, digits: Tensor) -> Tensor:  # int64 [samples, 2] -> [samples, WIDTH]
        return super().forward(digits + torch.tensor([0, 10], device=digits.device)).sum(dim=1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.layers(hidden)


def layer(index: int) -> nn.Module:
    """Layer `index` of LAYERS and two more, the same on whichever rank it is made."""
    torch.manual_seed(index)
    if index == 0:
        return Embed(20, WIDTH)
    return nn.Linear(WIDTH, 10) if index == LAYERS + 1 else Block()


def stage(index: int, num_stages: int) -> nn.Module:
    """An equal share of the layers."""
    cuts = [part * (LAYERS + 2) // num_stages for part in range(num_stages + 1)]
    return nn.Sequential(*map(layer, range(cuts[index], cuts[index + 1])))


def batch_of(step: int, samples: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets) of a step, the same on all ranks."""
    digits = torch.randint(10, (samples, 2), generator=torch.Generator().manual_seed(step))
    return digits, digits.sum(dim=1) % 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", default="2bw", help="a name, or the path of a CSV file with a program")
    parser.add_argument("--modules-per-rank", type=int, default=1, help="stages on each rank, dealt out in turn")
    parser.add_argument("--microbatches", type=int, help="of a batch; default: 8, or as the file says")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--save", metavar="FOLDER", help="write each rank's state in the end")
    parser.add_argument("--load", metavar="FOLDER", help="go on from there")
    args = parser.parse_args()

    is_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if is_cuda else "gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)

    num_stages = num_ranks * args.modules_per_rank
    modules = [stage(index, num_stages).to(device) for index in range(rank, num_stages, num_ranks)]

    def report(done) -> None:
        if rank == 0 and done is not None:
            print(f"step {done.batch + 1}: loss {done.loss:.6f}, gradient norm {done.grad_norm:.4f}", flush=True)

    with Pipeline(
        modules,
        schedule=args.schedule,
        num_microbatches=args.microbatches or (None if args.schedule.endswith(".csv") else 8),
        loss=cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=args.lr),
        clip_grad=1.0,
    ) as pipeline:
        if args.load:
            pipeline.load_state_dict(torch.load(f"{args.load}/rank-{rank}.pt"))
        for step in range(pipeline.next_batch, args.steps):
            report(pipeline.step(batch_of(step, args.batch_size) if pipeline.takes_batch else None))
        for done in pipeline.drain():
            report(done)
        if args.save:
            os.makedirs(args.save, exist_ok=True)
            torch.save(pipeline.state_dict(), f"{args.save}/rank-{rank}.pt")
        evaluated = pipeline.evaluate(batch_of(10**6, 512) if pipeline.takes_batch else None)
        if rank == 0:
            print(f"validation loss {evaluated.loss:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
