"""--rank-mapping in whole jobs on two emulated hosts, as torchrun and as Slurm's srun start them.

Hosts are told apart by PIPELINE_HOST_NAME; the topology lists the second host first, so that logical rank 0 is there,
away from the store.
"""

import contextlib
import functools
import json
import socket
import sys
from pathlib import Path

import pytest

from tests.reliability import launch
from tests.trainer.run import run_case

JOB = str(Path(__file__).with_name("rank_mapping_job.py"))
FLAGS = [*launch.TINY, *launch.SYNTHETIC, "--train-iters", "2"]
MAPPED = ["--rank-mapping", "pair-adjacent", "--rank-topology", "topology.json"]
HOSTS = ("alpha", "beta")


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run(directory: Path, jobs: list[tuple[list[str], dict[str, str]]]) -> str:
    """Run these commands side by side to a good end; what they printed."""
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(launch.Job(command, directory=directory, GLOO_SOCKET_IFNAME="lo", **environment))
            for command, environment in jobs
        ]
        outcomes = [job.wait() for job in running]
    for outcome in outcomes:
        outcome.assert_succeeded()
    return "\n".join(outcome.output for outcome in outcomes)


def job(per_host: int, *flags: str) -> list[str]:
    """The training program and its flags, with a stage on each process."""
    return [JOB, *FLAGS, "--pipeline-model-parallel-size", str(2 * per_host), "--metrics-file", "metrics.jsonl", *flags]


def tasks(per_host: int, *flags: str, local_ranks: bool = True) -> list[tuple[list[str], dict[str, str]]]:
    """One process for each task, by environment variables alone."""
    common = {"WORLD_SIZE": str(2 * per_host), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    jobs = []
    for rank in range(2 * per_host):
        own = {"RANK": str(rank), "PIPELINE_HOST_NAME": HOSTS[rank // per_host]}
        local = {"LOCAL_RANK": str(rank % per_host)} if local_ranks else {}
        jobs.append(([sys.executable, *job(per_host, *flags)], common | own | local))
    return jobs


def with_srun(directory: Path, per_host: int, *flags: str, **options: bool) -> str:
    """The tasks of one job."""
    return run(directory, tasks(per_host, *flags, **options))


def with_torchrun(directory: Path, per_host: int, *flags: str) -> str:
    """One agent for each host."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(per_host)]
    agent += ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    jobs = [
        ([*agent, "--node-rank", str(node), *job(per_host, *flags)], {"PIPELINE_HOST_NAME": host})
        for node, host in enumerate(HOSTS)
    ]
    return run(directory, jobs)


def places(output: str) -> list[dict]:
    """What each process printed, by the rank that it was started as."""
    found = [json.loads(line.removeprefix("PLACE ")) for line in output.splitlines() if line.startswith("PLACE ")]
    return sorted(found, key=lambda place: place["started_as"])


def write_topology(directory: Path, per_host: int) -> None:
    """The second host first."""
    nodes = [{"name": host, "gpus": per_host} for host in reversed(HOSTS)]
    content = {"nodes": nodes, "bandwidth": {"within_node": 10, "between_nodes": 1}}
    (directory / "topology.json").write_text(json.dumps(content))


@functools.cache
def standard(per_host: int) -> dict[int, float]:
    """By number of processes on a host: losses of the job as the launcher counts, here in a pool of workers."""
    found = run_case.train(2 * per_host, base=" ".join(FLAGS), flags="--mock-data")[-1]["losses"]
    assert sorted(found) == [1, 2]
    return found


PLACES = {  # host, rank and stage by physical rank
    1: [("alpha", 1, 1), ("beta", 0, 0)],
    2: [("alpha", 1, 1), ("alpha", 2, 2), ("beta", 0, 0), ("beta", 3, 3)],
}


@pytest.mark.full
@pytest.mark.parametrize("start", [with_torchrun, with_srun])
@pytest.mark.parametrize("per_host", [1, pytest.param(2, marks=pytest.mark.full)])
def test_ranks_move_and_numbers_stay(tmp_path, start, per_host):
    """Rank 0 and its pair on the second host, LOCAL_RANK untouched, every loss bit-equal to the standard mapping's."""
    write_topology(tmp_path, per_host)
    output = start(tmp_path, per_host, *MAPPED)
    found = places(output)
    assert [(place["host"], place["rank"], place["stage"]) for place in found] == PLACES[per_host]
    assert [place["local_rank"] for place in found] == [str(rank % per_host) for rank in range(2 * per_host)]
    assert [place["device_rank"] for place in found] == [int(place["local_rank"]) for place in found]
    assert [int(place["RANK"]) for place in found] == [place["rank"] for place in found]
    assert output.count("rank mapping pair-adjacent on 2 nodes") == 1
    assert launch.losses(tmp_path / "metrics.jsonl") == standard(per_host)


@pytest.mark.full
def test_launch_without_local_ranks(tmp_path):
    """Slots are then counted by physical rank on each host; here the first host holds stages 0 and 3."""
    output = with_srun(tmp_path, 2, "--rank-mapping", "pair-adjacent", local_ranks=False)
    assert [(place["rank"], place["local_rank"]) for place in places(output)] == [
        (0, None), (3, None), (1, None), (2, None),
    ]  # fmt: skip
    assert launch.losses(tmp_path / "metrics.jsonl") == standard(2)


@pytest.mark.full
def test_store_host_that_dies_is_named_by_its_new_rank(tmp_path):
    """The process that hosts the store is rank 1 by then: killed, it ends the other within 10 s, which says so."""
    write_topology(tmp_path, 1)
    first, second = tasks(1, *MAPPED, "--train-iters", "100000")
    with (
        launch.Job(first[0], directory=tmp_path, GLOO_SOCKET_IFNAME="lo", **first[1]) as host,
        launch.Job(second[0], directory=tmp_path, GLOO_SOCKET_IFNAME="lo", **second[1]) as other,
    ):
        launch.wait_for_iteration(host, tmp_path / "metrics.jsonl", 3)
        host.process.kill()
        killed = launch.now()
        outcome = other.wait()
        assert launch.now() - killed < 10
    assert outcome.status != 0
    assert "rank 0 (stage 0) stops: rank 1" in outcome.output and "ended without an error message" in outcome.output
