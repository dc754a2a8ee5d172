"""What a process of `two_hosts.py` runs: one stage of `bpipe` under each mapping, timed and counted in turns.

python benchmarks/two_hosts_ranks.py RANK ADDRESS_OF_RANK_0 JOB_AS_JSON
"""

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from megatron.pipeline.runtime.activations.activation_memory import ActivationMemory
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.emulated.stage import EmulatedStage, EmulatedTimes, EmulatedUpdate
from megatron.pipeline.schedules import Schedule
from tools.hosts import own_traffic, resent_bytes

PORT = 29500  # of a network where nobody else is
TIMEOUT = timedelta(seconds=60)


def engine(job: dict, slots: list[int]) -> PipelineEngine:
    """This process's, with the stage that the mapping gives it."""
    memory = ActivationMemory()
    stage = EmulatedStage(
        index=slots.index(dist.get_rank()),
        num_stages=job["num_stages"],
        times=EmulatedTimes(job["forward"], job["backward"]),
        payload_bytes=job["payload_bytes"],
        activation_bytes=job["activation_bytes"],
        activation_memory=memory,
    )
    schedule = Schedule.preset("bpipe", num_stages=job["num_stages"])
    update = EmulatedUpdate(job_group=dist.group.WORLD)
    return PipelineEngine(schedule, stage, update, ranks=slots, timeout=TIMEOUT, activation_memory=memory)


def run(job: dict) -> dict[str, dict]:
    """By mapping and repeat: seconds, the bytes that each host has sent, and how many of them at most were sent before
    (how many there are depends on how busy the machine is, not on the program). The first turns are not counted."""
    engines = {name: engine(job, slots) for name, slots in job["slots"].items()}
    found = {name: {"seconds": [], "sent": [], "resent": []} for name in engines}
    m, p = job["num_microbatches"], job["num_stages"]
    for repeat in range(job["repeats"] + 1):
        order = list(engines) if repeat % 2 else list(reversed(engines))
        for name in order:
            dist.barrier()
            before, resent, start = own_traffic(), resent_bytes(), time.monotonic()
            for _ in range(job["batches"] if repeat else 1):
                engines[name].run_batch(m, m)
            engines[name].drain()
            dist.barrier()
            seconds, sent = time.monotonic() - start, own_traffic().since(before).sent
            everywhere: list = [None] * p
            dist.all_gather_object(everywhere, (sent, resent_bytes() - resent))
            if repeat:
                found[name]["seconds"].append(seconds)
                hosts = (everywhere[0], everywhere[-1])
                found[name]["sent"].append([sent for sent, _ in hosts])
                found[name]["resent"].append([resent for _, resent in hosts])
    for each in engines.values():
        each.close()
    return found


def main() -> None:
    rank, address, job = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:{PORT}", rank=rank, world_size=job["num_stages"], timeout=TIMEOUT
    )
    found = run(job)
    if rank == 0:
        Path(job["result"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
