"""A training job in which one rank goes wrong: `python failing_job.py MODE RANK` under torchrun or a plain
launch, or `run` in a forked process.

Modes: `raise` (its forward of microbatch 5 raises), `kill` (it kills itself there), `cut` (it reads a mapped file there
that is cut short), `hang` (it sleeps there for longer than the transfer timeout of 3 s), `chain` (its third norm
reduction raises), `none` (all goes well), `input` (all ranks raise the same ValueError before the first batch). Under
bpipe: `kill-in-move` (it kills itself when its fifth move of saved activations has begun to send or to receive),
`hang-in-move` (it sleeps before it). Under l2l, two stages a rank: `raise-in-update` and `kill-in-update` (its lane of
the host's optimizer, in the third update of its higher stage); `kill-in-shared-update` and `hang-in-shared-update` (the
ranks are replicas that share one store, and it kills itself, or sleeps, there); `kill-in-shared-fetch` and
`hang-in-shared-fetch` (they gather what each fetches a share of, and it does before its eighth). A rank that goes wrong
prints when, in seconds of the machine's steady clock.
"""

import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))

import numpy
import torch

from megatron.pipeline.runtime.transport.links import NUM_TAGS

torch.set_num_threads(1)

from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.runtime.failure import failure_guard
from tests.pipeline.runtime.relay.relay_cases import Relay
from tests.pipeline.runtime.stages.module.module_cases import Pipeline
from tests.pipeline.runtime.stages.module.reference import Training


def say_when() -> None:
    print(f"goes wrong at {time.monotonic()}", flush=True)


def read_cut_file() -> None:
    with tempfile.NamedTemporaryFile(prefix="cut_short_", suffix=".idx") as file:
        file.write(bytes(100_000))
        file.flush()
        mapped = numpy.memmap(file.name, numpy.int64, "r")
        os.truncate(file.name, 5000)
        mapped.sum()


def go_wrong_in_move(pipeline: Pipeline, mode: str, *, number: int = 5) -> None:
    link, num_moves = pipeline.engine._channels.move_link, 0

    def failing(move, post):
        def run(buffer, tag):
            nonlocal num_moves
            num_moves += 1
            if num_moves == number:
                say_when()
                if mode == "hang-in-move":
                    time.sleep(60)
                work = post([buffer], link._peer, tag % NUM_TAGS)  # held until the kill
                time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
                work.wait()
            move(buffer, tag)

        return run

    link.send, link.receive = failing(link.send, link._group.send), failing(link.receive, link._group.recv)


def go_wrong_in_update(relay: Relay, mode: str) -> None:
    host, highest = relay.update._host, relay.stages[-1].index
    update = host.update

    def failing(stage, settings, **options):
        if (stage, relay.store.versions[stage]) == (highest, 2):
            say_when()
            if mode.startswith("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            if mode.startswith("hang"):
                time.sleep(60)
            raise MemoryError("the host has no room for a moment")
        update(stage, settings, **options)

    host.update = failing


def go_wrong_in_fetch(relay: Relay, mode: str) -> None:
    gather, num_gathered = relay.update.weights._gather, 0
    complete = gather.gather

    def failing(flat):
        nonlocal num_gathered
        num_gathered += 1
        if num_gathered == 8:
            say_when()
            if mode.startswith("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        complete(flat)

    gather.gather = failing


def go_wrong(pipeline: Pipeline, mode: str) -> None:
    stage, update = pipeline.stage, pipeline.update
    forward, reduce_norm = stage.forward, update.reduce_norm

    def failing_forward(microbatch, input):
        if microbatch.index == 5 and mode in ("raise", "kill", "hang", "cut"):
            say_when()
        if microbatch.index == 5 and mode == "raise":
            raise RuntimeError("the disk is on fire")
        if microbatch.index == 5 and mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if microbatch.index == 5 and mode == "cut":
            read_cut_file()
        if microbatch.index == 5 and mode == "hang":
            time.sleep(60)
        return forward(microbatch, input)

    def failing_reduce_norm(version, stop_requests, losses):
        if version == 3 and mode == "chain":
            say_when()
            raise RuntimeError("the sum does not add up")
        return reduce_norm(version, stop_requests, losses)

    stage.forward, update.reduce_norm = failing_forward, failing_reduce_norm


def run(mode: str, bad_rank: int, places: dict[str, str], output: str) -> None:
    """`main` as a session of its own whose output goes to a file."""
    os.setsid()
    os.environ.update(places)
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    main(mode, bad_rank)


def main(mode: str, bad_rank: int) -> None:
    torch.distributed.init_process_group("gloo")
    with failure_guard.guard():
        if mode == "input":
            print(f"goes wrong at {time.monotonic()}", flush=True)
            raise ValueError("the sequence length is -1; give a positive one")
        p = torch.distributed.get_world_size()
        moves, training = mode.endswith("-in-move"), Training(batches=(p,))
        timeout = timedelta(seconds=3 if mode.startswith("hang") else 60)
        if mode.endswith(("-update", "-fetch")):
            gathers = mode.endswith("-fetch")
            if "-in-shared-" in mode:
                training = Training(batches=(p,), num_replicas=p)
            pipeline = Relay(training, num_virtual_stages=2, residency=Residency(1), timeout=timeout, gathers=gathers)
            break_it = go_wrong_in_fetch if gathers else go_wrong_in_update
        else:
            pipeline = Pipeline("bpipe" if moves else "2bw", training, timeout=timeout, moves_activations=moves)
            break_it = go_wrong_in_move if moves else go_wrong
        if torch.distributed.get_rank() == bad_rank:
            break_it(pipeline, mode)
        for _ in range(8):
            pipeline.engine.run_batch(p, p)
        pipeline.engine.drain()
        pipeline.close()
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
