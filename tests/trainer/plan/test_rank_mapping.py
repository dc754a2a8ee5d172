"""--rank-mapping: decided on the process of physical rank 0, followed by all, and said in the log."""

import json
import os
import threading
from dataclasses import replace
from datetime import timedelta

import pytest

from megatron.pipeline.placement.mapping import Degrees, pair_adjacent
from megatron.pipeline.placement.topology import Process
from megatron.pipeline.runtime.failure.errors import SameEverywhere
from megatron.trainer.plan import arrangement
from tests.trainer.arguments.command_line import arguments

TWO_HOSTS = [Process("a", 0), Process("a", 1), Process("b", 0), Process("b", 1)]
PIPELINE = "--pipeline-model-parallel-size 4"
ELEMENT = 2 * 32 * 64  # bytes of an activation of `arguments` in 16 bits,
LAYER = 17 * ELEMENT  # of all that a layer saves but scores,
SCORES = 5 * 4 * 32 / 64 / 34  # and the scores' part of that


def topology(path, *names, gpus=2, **more):
    nodes = [{"name": name, "gpus": gpus} for name in names]
    path.write_text(json.dumps({"nodes": nodes, "bandwidth": {"within_node": 300, "between_nodes": 100}, **more}))
    return path


def balanced(extra, *, world_size=4):
    return arguments(f"{PIPELINE} --pipeline-schedule bpipe {extra}", world_size=world_size)


def test_pair_adjacent():
    """Stages 0 and 3 on host a, 1 and 2 on host b."""
    ranks, lines = arrangement.decide(balanced("--rank-mapping pair-adjacent"), TWO_HOSTS)
    assert ranks == [0, 3, 1, 2]
    assert lines == ["rank mapping pair-adjacent on 2 nodes: 0 of 1 pairs that move activations cross a node"]


def test_launcher_that_counts_over_hosts():
    """Slurm's cyclic distribution: slots are host and LOCAL_RANK, not physical ranks; standard leaves ranks alone."""
    cyclic = [Process("a", 0), Process("b", 0), Process("a", 1), Process("b", 1)]
    assert arrangement.decide(balanced("--rank-mapping pair-adjacent"), cyclic)[0] == [0, 1, 3, 2]


def test_standard_with_topology_only_reports(tmp_path):
    """Ranks stay as the launcher gave them; the log says what that costs."""
    path = topology(tmp_path / "t.json", "b", "a")
    ranks, lines = arrangement.decide(balanced(f"--rank-topology {path}"), TWO_HOSTS)
    assert ranks == [0, 1, 2, 3]
    assert "1 of 1 pairs that move activations cross a node; an iteration's transfers take" in lines[0]


@pytest.mark.parametrize(("batch", "in_a_row"), [(4, False), (512, True)])
def test_replicas_or_pipelines_share_a_host(batch, in_a_row):
    """With few microbatches gradients are more than what stages send, and replicas share a host; with many a pipeline
    does."""
    job = arguments(f"--pipeline-model-parallel-size 2 --global-batch-size {batch}", world_size=4)
    assert arrangement.pipelines_in_a_row(job, TWO_HOSTS) is in_a_row


def test_topology_may_put_rank_0_on_the_second_host(tmp_path):
    """The file's order of nodes is the order of slots."""
    path = topology(tmp_path / "t.json", "b", "a")
    assert arrangement.decide(balanced(f"--rank-mapping pair-adjacent --rank-topology {path}"), TWO_HOSTS)[0] == [
        1,
        2,
        0,
        3,
    ]


def test_job_on_a_part_of_the_topology(tmp_path):
    """Two of three nodes, two processes on nodes of eight: the rest is left out, and shares nothing."""
    whole = topology(tmp_path / "whole.json", "a", "x", "b", gpus=8)
    part = topology(tmp_path / "part.json", "a", "b")
    flags = "--rank-mapping optimized --rank-topology"
    assert arrangement.decide(balanced(f"{flags} {whole}"), TWO_HOSTS) == arrangement.decide(
        balanced(f"{flags} {part}"), TWO_HOSTS
    )


def test_optimized_and_file(tmp_path):
    """optimized keeps the pair together, too; a file is taken as it is, slot by slot."""
    path = topology(tmp_path / "t.json", "a", "b")
    ranks, _ = arrangement.decide(balanced(f"--rank-mapping optimized --rank-topology {path}"), TWO_HOSTS)
    assert sorted(ranks[:2]) in ([0, 3], [1, 2])
    (tmp_path / "map.yaml").write_text("[3, 2, 1, 0]")
    assert arrangement.decide(balanced(f"--rank-mapping {tmp_path}/map.yaml"), TWO_HOSTS)[0] == [3, 2, 1, 0]


def test_transfer_that_does_not_fit_is_a_warning(tmp_path):
    """Tensor parallel size 2 fills nodes of 2: said, with the bandwidth that is needed and whether it is there."""
    hosts = [Process(name, local) for name in "abcd" for local in (0, 1)]
    flags = "--tensor-model-parallel-size 2 --rank-mapping pair-adjacent --rank-topology"
    slow = topology(tmp_path / "slow.json", *"abcd", teraflops_per_gpu=1000)
    _, lines = arrangement.decide(balanced(f"{flags} {slow}", world_size=8), hosts)
    assert "2 of 2 pairs that move activations cross a node, for tensor parallel size 2 fills a node of 2" in lines[0]
    assert lines[1].startswith("warning: compute will wait for pairs: the transfer of a microbatch")
    assert "goes at 50 GB/s between nodes" in lines[1] and lines[1].endswith("too slow")
    fast = topology(tmp_path / "fast.json", *"abcd", teraflops_per_gpu=0.001)
    _, lines = arrangement.decide(balanced(f"{flags} {fast}", world_size=8), hosts)
    assert lines[1].startswith("pairs: ") and lines[1].endswith("it fits")
    unknown = topology(tmp_path / "unknown.json", *"abcd")
    _, lines = arrangement.decide(balanced(f"{flags} {unknown}", world_size=8), hosts)
    assert lines[1].startswith("pairs: ") and lines[1].endswith("if a forward takes as long")


def test_pairs_that_cross_an_unknown_network_are_a_warning():
    """Without a topology nobody can say whether it is fast enough: the bytes, and the remedy; none where none cross."""
    hosts = [Process(name, local) for name in "abcd" for local in (0, 1)]
    flags = "--tensor-model-parallel-size 2 --rank-mapping pair-adjacent"
    _, lines = arrangement.decide(balanced(flags, world_size=8), hosts)
    assert "2 of 2 pairs that move activations cross a node, for tensor parallel size 2 fills a node of 2" in lines[0]
    assert lines[1].startswith("warning: pairs that cross a node move ") and "give --rank-topology" in lines[1]
    assert len(arrangement.decide(balanced("--rank-mapping pair-adjacent"), TWO_HOSTS)[1]) == 1


def test_batch_too_small_to_move_anything():
    """Two microbatches do not fill four stages: no pair moves, and no advice is given."""
    few = balanced("--rank-mapping pair-adjacent --global-batch-size 2 --micro-batch-size 1")
    assert arrangement.evictors(few) == ()
    assert arrangement.decide(few, TWO_HOSTS)[1] == [
        "rank mapping pair-adjacent on 2 nodes: no pair has activations to move"
    ]


def test_bytes_follow_the_precision(tmp_path):
    """FP32 sends twice what bf16 sends, and bf16 reduces gradients in 16 bits unless they are accumulated in FP32."""
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"

    def traffic(more):
        return arrangement.estimated_traffic(arguments(f"{flags} {more}", world_size=8))

    wide, narrow, kept = traffic(""), traffic("--bf16"), traffic("--bf16 --accumulate-allreduce-grads-in-fp32")
    assert wide.pipeline[0] == 2 * narrow.pipeline[0] == 2 * kept.pipeline[0] > 0
    assert wide.data == kept.data and wide.embedding == kept.embedding
    assert traffic("--bf16 --sequence-parallel").pipeline[0] == narrow.pipeline[0] / 2


def test_several_stages_on_a_rank():
    """What a run sends: twice from rank to rank, once from the last to the first; half the bytes move at each stage."""
    flags = "--pipeline-model-parallel-size 4 --num-layers 8 --micro-batch-size 1 --global-batch-size 8"
    one = arguments(f"{flags} --pipeline-schedule bpipe", world_size=4)
    two = arguments(f"{flags} --num-virtual-stages-per-pipeline-rank 2 --balance-activations", world_size=4)
    edge = arrangement.estimated_traffic(one).pipeline[0]
    assert arrangement.estimated_traffic(one).pipeline == (edge, edge, edge, 0)
    assert arrangement.estimated_traffic(two).pipeline == (2 * edge, 2 * edge, 2 * edge, edge)
    assert arrangement.evictors(two) == (0,) and arrangement.estimated_traffic(two).pair[0] > 0
    whole, half = (arrangement.cut_model(args) for args in (one, two))
    assert set(half.layers) == {1} and set(whole.layers) == {2}
    assert half.moved_bytes[1] == whole.moved_bytes[1] / 2


def test_flash_attention_saves_no_scores():
    """As if the attention were recomputed: equation 5. The kernels take 16-bit numbers only."""

    def moved(more, implementation):
        return arrangement.cut_model(replace(balanced(more), transformer_impl=implementation)).moved_bytes[1]

    engine = "transformer_engine"
    assert moved("--bf16", engine) == moved("--bf16 --recompute-activations", "local") < moved("--bf16", "local")
    assert moved("--bf16 --attention-backend unfused", engine) == moved("--bf16", "local")
    assert moved("", engine) == moved("", "local")


def test_pairs_without_transfers_are_noted():
    """pair-adjacent under a schedule that moves nothing between pairs has no use."""
    args = arguments(f"{PIPELINE} --rank-mapping pair-adjacent", world_size=4)
    lines = arrangement.decide(args, TWO_HOSTS)[1]
    assert lines[1] == (
        "note: --rank-mapping pair-adjacent brings pairs together, between which --pipeline-schedule flush moves no "
        "activations"
    )


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ("", 1 + SCORES),
        ("--recompute-activations", 1),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", ELEMENT / LAYER),
        ("--pipeline-recompute", ELEMENT / LAYER),
    ],
)
def test_what_moves_is_what_is_not_recomputed(flags, kept):
    """A layer saves 34 bytes an element in 16 bits, and 5 a score. What is recomputed as a whole, as layers or by the
    program, saves its input: none where that is tokens."""
    moved = arrangement.cut_model(balanced(f"--bf16 {flags}")).moved_bytes
    assert moved[1] == pytest.approx(kept * LAYER)
    assert (moved[0] == 0) == (flags == "--pipeline-recompute")


@pytest.mark.parametrize(
    ("local", "words"),
    [("2", "warning: tensor parallel size 2 fills a node of 2 GPUs"), ("4", "note: under --rank-mapping standard")],
)
def test_advice_where_nothing_is_asked_for(monkeypatch, local, words):
    """torchrun's LOCAL_WORLD_SIZE shows that there are several nodes; the store is not touched."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    args = balanced("--tensor-model-parallel-size 2", world_size=8)
    (line,) = arrangement.assign_rank(args, None, rank=3, world_size=8, timeout=timedelta(seconds=1)).lines
    assert line.startswith(words)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2²")  # no number that int() takes
    assert arrangement.assign_rank(args, None, rank=3, world_size=8, timeout=timedelta(seconds=1)).lines == ()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    args = arguments(f"{PIPELINE} --tensor-model-parallel-size 2", world_size=8)
    assert arrangement.assign_rank(args, None, rank=3, world_size=8, timeout=timedelta(seconds=1)).lines == ()


def test_optimized_needs_a_topology():
    """Refused with the flags, before anything starts."""
    with pytest.raises(ValueError, match="--rank-mapping optimized needs --rank-topology"):
        arguments("--rank-mapping optimized")


def assign(monkeypatch, processes, *extra):
    """What `assign_rank` gives or raises on each process, in threads over one store."""
    from torch.distributed import HashStore

    monkeypatch.setenv("RANK", "as launched")
    monkeypatch.setenv("LOCAL_RANK", "as launched")
    here, store, found = threading.local(), HashStore(), [None] * len(processes)
    monkeypatch.setattr(arrangement, "this_process", lambda: processes[here.rank])

    def run(rank):
        here.rank = rank
        args = arguments(f"{PIPELINE} {' '.join(extra)}", world_size=len(processes))
        timeout = timedelta(seconds=30)
        try:
            found[rank] = arrangement.assign_rank(args, store, rank=rank, world_size=len(processes), timeout=timeout)
        except SameEverywhere as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(processes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_follow_one_decision(monkeypatch, tmp_path):
    """Every process gets its rank, and who hosts the store: physical rank 0, here logical rank 1."""
    path = topology(tmp_path / "t.json", "b", "a")
    found = assign(monkeypatch, TWO_HOSTS, "--rank-mapping pair-adjacent", f"--rank-topology {path}")
    assert [(each.rank, each.store_host) for each in found] == [(1, 1), (2, 1), (0, 1), (3, 1)]
    assert os.environ["RANK"] in "0123" and os.environ["LOCAL_RANK"] == "as launched"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--rank-mapping nearest", "nearest cannot be read"),
        ("--rank-mapping {}/short.json", "short.json lists 2 ranks for 4 processes"),
        ("--rank-topology {}/none.yaml", "none.yaml cannot be read"),
        ("--rank-topology {}/other.json", "host a of the job is not among the topology's nodes (x, y)"),
    ],
)
def test_problem_is_told_to_all(monkeypatch, tmp_path, flags, reason):
    """Files and hosts that do not fit: the same sentence on every process, before a group forms."""
    (tmp_path / "short.json").write_text("[0, 1]")
    topology(tmp_path / "other.json", "x", "y")
    found = assign(monkeypatch, TWO_HOSTS, flags.format(tmp_path))
    assert all(isinstance(error, SameEverywhere) and reason in str(error) for error in found)
    assert len(set(map(str, found))) == 1


def test_figure_6_in_a_run():
    """Logical rank by process of two hosts of 8, counted in blocks; over the hosts in turn, each slot has the same."""
    flags = "--tensor-model-parallel-size 2 --rank-mapping pair-adjacent"
    first_host = [0, 1, 12, 13, 4, 5, 8, 9]  # PP 0, 3, 1, 2 of DP 0
    second_host = [2, 3, 14, 15, 6, 7, 10, 11]
    blocks = [Process(name, local) for name in "ab" for local in range(8)]
    assert arrangement.decide(balanced(flags, world_size=16), blocks)[0] == first_host + second_host
    in_turn = [Process(name, local) for local in range(8) for name in "ab"]
    ranks = arrangement.decide(balanced(flags, world_size=16), in_turn)[0]
    assert (ranks[::2], ranks[1::2]) == (first_host, second_host)


def test_mapping_is_that_of_the_room():
    """With hosts in blocks, physical ranks become what the mapping says of their slots."""
    args = arguments(f"{PIPELINE} --rank-mapping pair-adjacent", world_size=8)
    hosts = [Process(name, local) for name in "ab" for local in range(4)]
    assert tuple(arrangement.decide(args, hosts)[0]) == pair_adjacent(Degrees(tensor=1, pipeline=4, data=2))
