"""The cost of BPipe's pairs across the network between two hosts, and the saving by pair-adjacent placement.

    python benchmarks/two_hosts.py                 # about 2 minutes; needs Linux network namespaces (tools/hosts.py)
    python benchmarks/two_hosts.py --rate 100      # a slower link
    python benchmarks/two_hosts.py --json result.json

Two hosts in network namespaces are joined by a link of `--rate` Mbit/s each way. Each host runs half of the stages of
`bpipe`: engine, transfers and moves of saved activations are real and cross the real link, while stages sleep instead
of computing. The same processes run the stages in two orders, in turns: `standard` (the first half of the stages on the
first host, so that all pairs cross) and `pair-adjacent` (no pair crosses).

sent       bytes per batch by the counter of a host's network device, beside the bytes predicted from the program's
           sends: activations, gradients, evictions and returns of the stages whose peer is on the other host. TCP's
           headers and acknowledgements and the reductions of the norm come in addition, and so do segments that TCP
           sends again after a late acknowledgement, for which the kernel's count gives an upper bound.
ratio      time per batch under standard over the time under pair-adjacent, within a repeat.
simulated  `megatron.pipeline.simulate` of the same program, in which a transfer between hosts takes its bytes over the
           rate. Each kind of traffic has a simulated link of its own, but the real link is shared, so both times are
           lower bounds.

Figures are medians of the repeats with least and greatest in parentheses.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from benchmarks.common.emulated import run_batches
from benchmarks.common.processes import environment, gathered
from benchmarks.common.results import parser_of, save
from benchmarks.common.tables import spread
from megatron.pipeline.placement.mapping import Degrees, inverse, pair_adjacent, standard
from megatron.pipeline.program.instruction import MOVES
from megatron.pipeline.program.lane_order import pair_of
from megatron.pipeline.program.program import Program
from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.emulated import EmulatedStage, EmulatedTimes, EmulatedUpdate
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from tools.hosts import Hosts, HostsUnavailable, own_traffic, resent_bytes

PORT = 29500  # always free, in a network namespace of its own
TIMEOUT = timedelta(seconds=60)


def engine(job: dict, slots: list[int]) -> PipelineEngine:
    """Make this process's engine, with the stage that the mapping gives it. `slots`: the process of each stage."""
    memory = ActivationMemory()
    stage = EmulatedStage(
        index=slots.index(dist.get_rank()), num_stages=job["num_stages"], activation_memory=memory,
        times=EmulatedTimes(job["forward"], job["backward"]), payload_bytes=job["payload_bytes"],
        activation_bytes=job["activation_bytes"],
    )  # fmt: skip
    schedule = Schedule.preset("bpipe", num_stages=job["num_stages"])
    update = EmulatedUpdate(job_group=dist.group.WORLD)
    return PipelineEngine(schedule, stage, update, ranks=slots, timeout=TIMEOUT, activation_memory=memory)


def run(job: dict) -> dict[str, dict]:
    """Run all turns. Returns by mapping, for each repeat: seconds, bytes sent by each host, and a bound of resent ones.

    Resent bytes depend on the load of the machine, not on the program. The first turn of each mapping is not counted.
    """
    engines = {name: engine(job, slots) for name, slots in job["slots"].items()}
    found = {name: {"seconds": [], "sent": [], "resent": []} for name in engines}
    batches = [job["num_microbatches"]] * job["batches"]
    for repeat in range(job["repeats"] + 1):
        order = list(engines) if repeat % 2 else list(reversed(engines))
        for name in order:
            dist.barrier()
            before, resent, start = own_traffic(), resent_bytes(), time.monotonic()
            run_batches(engines[name], batches if repeat else batches[:1])
            engines[name].drain()
            dist.barrier()
            seconds, sent = time.monotonic() - start, own_traffic().since(before).sent
            everywhere = gathered((sent, resent_bytes() - resent))
            if repeat:
                found[name]["seconds"].append(seconds)
                hosts = (everywhere[0], everywhere[-1])
                found[name]["sent"].append([sent for sent, _ in hosts])
                found[name]["resent"].append([resent for _, resent in hosts])
    for each in engines.values():
        each.close()
    return found


def run_rank(rank: str, address: str, job: str) -> None:
    """Run one process. `address`: address of rank 0's host. `job`: the job as JSON."""
    asked, where = json.loads(job), f"tcp://{address}:{PORT}"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=where, rank=int(rank), world_size=asked["num_stages"], timeout=TIMEOUT)
    found = run(asked)
    if dist.get_rank() == 0:
        Path(asked["result"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


MAPPINGS = {"standard": standard, "pair-adjacent": pair_adjacent}


def slots_of_stages(mapping: str, num_stages: int) -> tuple[int, ...]:
    """The process that runs each stage; the first half of the processes is on the first host."""
    return inverse(MAPPINGS[mapping](Degrees(tensor=1, pipeline=num_stages, data=1)))


def host_of_stages(mapping: str, num_stages: int) -> list[int]:
    return [2 * slot // num_stages for slot in slots_of_stages(mapping, num_stages)]


def crossing_bytes(program: Program, host: Sequence[int], *, payload_bytes: int, activation_bytes: int) -> list[dict]:
    """The bytes that each host sends to the other under `program`: between neighbours, and between pairs."""
    p = len(host)
    sent = [{"neighbours": 0, "pairs": 0} for _ in range(2)]
    for instruction in (instruction for row in program.rows for instruction in row):
        stage = instruction.stage
        word = instruction.kind.row
        if word.sends:
            peer = program.graph.peer_of(instruction)
            sent[host[stage]]["neighbours"] += payload_bytes * (host[peer] != host[stage])
        elif instruction.kind in MOVES and word.saved < 0:
            sent[host[stage]]["pairs"] += activation_bytes * (host[pair_of(stage, p)] != host[stage])
    return sent


def simulated_seconds(program: Program, host: Sequence[int], args: argparse.Namespace) -> float:
    p = len(host)
    over = {True: args.rate * 1e6 / 8, False: float("inf")}
    costs = Costs(
        forward=args.forward,
        backward=args.backward,
        bandwidth=[over[host[stage] != host[stage + 1]] for stage in range(p - 1)],
        forward_bytes=args.payload,
        evict=[args.activations / over[host[stage] != host[pair_of(stage, p)]] for stage in range(p)],
    )
    return simulate(program, costs).makespan / len(program.batches)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, json="file for every measured time and byte")
    parser.add_argument("--stages", type=int, default=4, help="p, even, 4 to 16: half on each host")
    parser.add_argument("--microbatches", type=int, default=16, help="m")
    parser.add_argument("--batches", type=int, default=2, help="timed, of each mapping in each repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--forward", type=float, default=20.0, help="ms")
    parser.add_argument("--backward", type=float, default=40.0, help="ms")
    parser.add_argument("--payload", type=int, default=1 << 17, help="bytes between neighbours, of a microbatch")
    parser.add_argument("--activations", type=int, default=1 << 22, help="bytes that a stage saves of a microbatch")
    parser.add_argument("--rate", type=float, default=200.0, help="Mbit/s of each host")
    args = parser.parse_args(arguments)
    if args.stages % 2 or not 4 <= args.stages <= 16:
        parser.error(f"--stages is {args.stages}; give 4, 6, ... or 16, half for each host")
    if min(args.microbatches, args.batches, args.repeats) < 1 or min(args.forward, args.backward, args.rate) <= 0:
        parser.error("--microbatches, --batches, --repeats: at least 1; --forward, --backward, --rate: more than 0")
    if args.payload < 4 or args.payload % 4 or args.activations < 1:
        parser.error("--payload: a multiple of 4; --activations: at least 1")
    args.forward, args.backward = args.forward / 1e3, args.backward / 1e3
    return args


def measure(args: argparse.Namespace, directory: Path) -> list[dict]:
    """Run the processes on both hosts. Returns the result of `run`."""
    result = directory / "result.json"
    job = {
        "num_stages": args.stages, "num_microbatches": args.microbatches, "batches": args.batches,
        "repeats": args.repeats, "forward": args.forward, "backward": args.backward, "payload_bytes": args.payload,
        "activation_bytes": args.activations, "result": str(result),
        "slots": {name: slots_of_stages(name, args.stages) for name in MAPPINGS},
    }  # fmt: skip
    variables = environment(OMP_NUM_THREADS="1")
    variables.pop("GLOO_SOCKET_IFNAME", None)
    module = ["-m", "benchmarks.common.rank", "benchmarks.two_hosts:run_rank"]
    with Hosts(2, bytes_per_second=args.rate * 1e6 / 8) as hosts:
        processes = []
        try:
            for rank in range(args.stages):
                command = [sys.executable, *module, str(rank), hosts.addresses[0], json.dumps(job)]
                processes.append(subprocess.Popen(hosts.command(2 * rank // args.stages, command), env=variables))
            if any([process.wait() for process in processes]):
                raise RuntimeError("a process of the benchmark failed; its output is above")
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return json.loads(result.read_text())


def per_batch(numbers: Sequence[Sequence[int]], batches: int) -> list[list[float]]:
    return [[number / batches for number in hosts] for hosts in numbers]


def rows_of(args: argparse.Namespace, found: dict) -> list[dict]:
    schedule = Schedule.preset("bpipe", num_stages=args.stages)
    program = schedule.build((args.microbatches,) * args.batches)
    rows = []
    for name, measured in found.items():
        host = host_of_stages(name, args.stages)
        crossing = crossing_bytes(program, host, payload_bytes=args.payload, activation_bytes=args.activations)
        rows.append({
            "mapping": name, "measured": [seconds / args.batches for seconds in measured["seconds"]],
            "sent": per_batch(measured["sent"], args.batches), "resent": per_batch(measured["resent"], args.batches),
            "predicted": [{kind: number / args.batches for kind, number in each.items()} for each in crossing],
            "simulated": simulated_seconds(program, host, args),
        })  # fmt: skip
    return rows


def show(rows: list[dict]) -> None:
    for row in rows:
        print(f"{row['mapping']}: {spread([1e3 * each for each in row['measured']], 1, ',')} ms a batch")
        for host, predicted in enumerate(row["predicted"]):
            sent = spread([each[host] / 1e6 for each in row["sent"]], 3, ",")
            total = sum(predicted.values()) / 1e6
            print(f"  host{host} sent {sent} MB a batch; the program's sends: {total:.3f} MB, of which pairs "
                  f"{predicted['pairs'] / 1e6:.3f}")  # fmt: skip
            if any(each[host] for each in row["resent"]):
                resent = spread([each[host] / 1e6 for each in row["resent"]], 3, ",")
                print(f"    of which sent again, at most {resent}")
    slow, fast = rows
    ratios = [a / b for a, b in zip(slow["measured"], fast["measured"], strict=True)]
    print(f"{slow['mapping']} over {fast['mapping']}: {spread(ratios, 3)}; simulated "
          f"{slow['simulated'] / fast['simulated']:.3f}")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="two-hosts-") as directory:
            rows = rows_of(args, measure(args, Path(directory)))
    except HostsUnavailable as error:
        print(f"two_hosts.py: error: {error}", file=sys.stderr)
        return 1
    show(rows)
    save(args, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
