"""Draw the pictures of docs/ into docs/images: python docs/make_images.py [NAME ...]."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.pipeline.draw import draw_timeline
from megatron.pipeline.placement.mapping import Degrees, pair_adjacent, standard
from megatron.pipeline.placement.placement_report import draw_placement, make_report
from megatron.pipeline.placement.topology import Bandwidth, Node, Topology
from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import Costs, simulate
from megatron.pipeline.simulate.critical_path import critical_path
from megatron.pipeline.simulate.memory_curve import MemorySizes
from megatron.pipeline.simulate.timeline import Timeline

IMAGES = Path(__file__).resolve().parent / "images"
FORWARDS = "time, in forwards of one microbatch"


def timeline(name: str, num_stages: int, batches: tuple[int, ...], *, costs: Costs | None = None, **flags) -> Timeline:
    return simulate(Schedule.preset(name, num_stages=num_stages, **flags).build(batches), costs)


def figure_1() -> None:
    """GPipe and PipeDream, as in Figure 1 of the 2BW paper."""
    draw_timeline(
        [
            timeline("gpipe", 4, (4, 4)).named("gpipe: batches of 4"),
            timeline("pipedream", 4, (1,) * 10).named("pipedream: an update after each microbatch"),
        ],
        IMAGES / "gpipe_pipedream.png",
        time_label=FORWARDS,
    )


def figure_2() -> None:
    """2BW, as in Figure 2, numbered from 1 as there."""
    draw_timeline(
        timeline("2bw", 4, (4, 4, 4)),
        IMAGES / "2bw.png",
        title="2bw: 4 stages, batches of 4",
        one_based=True,
        time_label=FORWARDS,
    )


def figure_3() -> None:
    """GPipe and flush on two stages, as in Figure 3, with what they save."""
    draw_timeline(
        [
            timeline("gpipe", 2, (4, 4)).named("gpipe: 2 stages, batches of 4"),
            timeline("flush", 2, (4, 4)).named("flush"),
        ],
        IMAGES / "gpipe_flush.png",
        saved_microbatches=True,
        time_label=FORWARDS,
    )


def bpipe() -> None:
    """The same batch with and without balancing, as in Figure 4 of the BPipe paper; a move takes half a forward."""
    draw_timeline(
        [
            timeline("flush", 4, (8,)).named("flush: 4 stages, a batch of 8"),
            timeline("bpipe", 4, (8,), costs=Costs(evict=0.5)).named("bpipe"),
        ],
        IMAGES / "bpipe.png",
        saved_microbatches=True,
        time_label=FORWARDS,
    )


def flush_and_2bw() -> None:
    """The same three batches with and without flushes, on one scale."""
    draw_timeline(
        [
            timeline("flush", 4, (4,) * 3).named("flush: 4 stages, batches of 4"),
            timeline("2bw", 4, (4,) * 3).named("2bw"),
        ],
        IMAGES / "flush_2bw.png",
        time_label=FORWARDS,
    )


def provisional() -> None:
    """2bw with predicted weights: from what each stage has done, and from one microbatch on every stage."""
    costs = Costs(step=0.2, predict=0.3, hold=0.15)
    uniform = {"predict": True, "provisional_microbatches": 1}
    draw_timeline(
        [
            timeline("2bw", 4, (4,) * 3, costs=costs, predict=True).named("2bw --provisional: 4 stages, batches of 4"),
            timeline("2bw", 4, (4,) * 3, costs=costs, **uniform).named("2bw --provisional-microbatches 1"),
        ],
        IMAGES / "provisional.png",
        time_label=FORWARDS,
    )


def extra_warmup() -> None:
    """Slow links without and with the longer warm-up."""
    costs = Costs(latency=0.4)
    draw_timeline(
        [
            timeline("2bw", 4, (7,) * 2, costs=costs).named("2bw: latency 0.4 on each link"),
            timeline("2bw", 4, (7,) * 2, costs=costs, extra_warmup=True).named("2bw with extra warm-up"),
        ],
        IMAGES / "extra_warmup.png",
        saved_microbatches=True,
        lanes=True,
        time_label=FORWARDS,
    )


def chain() -> None:
    """Reductions of all kinds, hidden behind the computations of the next batch."""
    costs = Costs(reduce_grad=2.0, reduce_embed=2.0, reduce_norm=1.5, step=0.4, latency=0.05)
    draw_timeline(
        timeline("2bw", 4, (6,) * 3, costs=costs, data_parallel=True, tied_embeddings=True),
        IMAGES / "chain.png",
        title="2bw with replicas, tied embeddings and clipping",
        lanes=True,
        time_label=FORWARDS,
    )


def recompute() -> None:
    """Recompute before each backward, over a batch-size ramp-up."""
    draw_timeline(
        timeline("2bw", 3, (3, 4, 6), recompute=True),
        IMAGES / "recompute.png",
        title="2bw: 3 stages, batches of 3, 4 and 6, recompute",
        time_label=FORWARDS,
    )


def critical() -> None:
    """What bounds two balanced batches, and what each stage holds meanwhile."""
    program = Schedule.preset("bpipe", num_stages=4).build((8, 8))
    costs = Costs(latency=0.2, reduce_norm=1.0, step=0.3, evict=0.5)
    planned = simulate(program, costs)
    sizes = MemorySizes(activations=2.0, weights=3.0, gradients=3.0, optimizer=6.0, transfers=0.2)
    draw_timeline(
        planned,
        IMAGES / "critical_path.png",
        title="bpipe: latency 0.2, the norm 1, a step 0.3",
        critical_path=critical_path(planned, costs),
        memory=(sizes, program.weights),
        time_label=FORWARDS,
    )


def interleaved() -> None:
    """A batch with one stage on each rank, and with two of half the size."""
    halves = Costs(forward=0.5, backward=1.0)
    draw_timeline(
        [
            timeline("flush", 4, (8,)).named("flush: 4 ranks with a stage each, a batch of 8"),
            timeline("interleaved", 8, (8,), costs=halves, num_virtual_stages=2).named("interleaved: 2 stages each"),
        ],
        IMAGES / "interleaved.png",
        time_label="time, in forwards of one microbatch through a rank's share of the model",
    )


def zero_bubble() -> None:
    """Backwards in halves, beside whole ones, and two stages a rank in a V."""
    draw_timeline(
        [
            timeline("flush", 4, (8,)).named("flush: 4 stages, a batch of 8"),
            timeline("zb-h1", 4, (8,)).named("zb-h1"),
        ],
        IMAGES / "zb_h1.png",
        saved_microbatches=True,
        time_label=FORWARDS,
    )
    halves = Costs(forward=0.5, backward=1.0)
    draw_timeline(
        timeline("zbv", 8, (8,), costs=halves),
        IMAGES / "zbv.png",
        title="zbv: 4 ranks of 2 stages in a V, a batch of 8",
        saved_microbatches=True,
        time_label="time, in forwards of one microbatch through a rank's share of the model",
    )


def l2l() -> None:
    """Weights on the host: updates at once, and behind the step."""
    costs = Costs(fetch=2.0, store=2.0, update=8.0, reduce_norm=1.0)
    stages = {"num_virtual_stages": 6, "costs": costs}
    draw_timeline(
        [
            timeline("l2l", 6, (4,) * 2, residency=Residency(2, "eager"), **stages).named(
                "l2l: 6 stages, eager updates"
            ),
            timeline("l2l", 6, (4,) * 2, residency=Residency(2, "deferred"), **stages).named("l2l: deferred updates"),
        ],
        IMAGES / "l2l.png",
        saved_microbatches=True,
        lanes=True,
        time_label=FORWARDS,
    )


def placement() -> None:
    """Figures 5 and 6 of the BPipe paper."""
    nodes = tuple(Node(name=f"node {index}", gpus=8) for index in range(2))
    topology = Topology(nodes=nodes, bandwidth=Bandwidth(within_node=300, between_nodes=100))
    deep, wide = Degrees(tensor=1, pipeline=16, data=1), Degrees(tensor=2, pipeline=4, data=2)
    for name, mapping, degrees, figure in (
        ("standard", standard(deep), deep, "5a"),
        ("pair-adjacent", pair_adjacent(deep), deep, "5b"),
        ("pair-adjacent", pair_adjacent(wide), wide, "6"),
    ):
        draw_placement(
            make_report(name, mapping, degrees, topology, evictors=()), IMAGES / f"placement_figure_{figure}.png"
        )


DRAWINGS = (
    figure_1, figure_2, figure_3, bpipe, flush_and_2bw, provisional, extra_warmup, chain, recompute, critical,
    interleaved, zero_bubble, l2l, placement,
)  # fmt: skip


def main(names: list[str]) -> None:
    IMAGES.mkdir(exist_ok=True)
    for drawing in DRAWINGS:
        if not names or drawing.__name__ in names:
            drawing()


if __name__ == "__main__":
    main(sys.argv[1:])
