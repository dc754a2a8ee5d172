"""Where mixed stages win, on graphs whose best partitions are known by hand, and the simulation of published runs."""

import functools

import pytest
from rich.console import Console

from megatron.partition import Partition, parse_graph
from papers.ftpipe import mixed_cuts, published_speedups
from papers.ftpipe.asynchronous import contender_of, figure_4, of_busiest_rank, simulated
from papers.ftpipe.mixed_models import MODELS
from papers.ftpipe.partition_units_graphs import Estimated

CASE = next(iter(MODELS.values()))
LAYER = {"params": 1, "mem_bytes": 0, "out_bytes": 0}


class OfLayers(Estimated):
    """A model whose nodes are layers."""

    def graph(self, units):
        return parse_graph(self.content)


def layers(*milliseconds, **machine):
    """A chain of layers of one parameter each."""
    nodes = [{"id": i, "fwd_ms": each / 4, "bwd_ms": 3 * each / 4, **LAYER} for i, each in enumerate(milliseconds)]
    content = {
        "nodes": nodes, "edges": [[i, i + 1] for i in range(len(nodes) - 1)], "num_devices": 2,
        "memory_limit_bytes": 100, "bandwidth_gigabytes_per_second": 10, "weight_bytes_per_parameter": 1,
    }  # fmt: skip
    return OfLayers(None, content | machine)


def gain(model, devices, room, **options):
    (found,) = mixed_cuts.gains("", model, CASE, devices, room, effort=0.05, units=("layers",), **options)
    return found


ENCODER_DECODER = layers(*[5.5] * 6, *[1.0] * 6)


@pytest.mark.parametrize(
    ("devices", "room", "sequential", "mixed"),
    [(3, 1.0, 22.0, 13.0), (3, None, 16.5, 13.0), (2, None, 22.0, 19.5), (2, 1.0, 33.0, 19.5)],
)
def test_gains_of_figure_4(devices, room, sequential, mixed):
    """Six encoder layers, 5.5 times as slow as six decoder layers. Tight memory makes sequential worse, not mixed."""
    found = gain(ENCODER_DECODER, devices, room)
    assert found.objective_ms == pytest.approx({"sequential": sequential, "mixed": mixed})
    assert found.simulated_ms == pytest.approx(found.objective_ms, rel=0.03)
    assert found.text().startswith(f"{sequential / mixed:.2f} (")


def test_equal_layers_gain_nothing():
    found = gain(layers(*[2.0] * 8), 4, 1.0)
    assert found.objective_ms == {"sequential": 4.0, "mixed": 4.0}
    assert len(found.stages) == 4


RUN = functools.partial(mixed_cuts.rounds_of, seconds=0.02, rounds=1)


@pytest.mark.full
def test_what_runs_takes_the_times_of_its_partition(capsys):
    """Stages that sleep, on three processes, each arm on its own partition: no rank is faster than its stages."""
    found = gain(ENCODER_DECODER, 3, 1.0, run=RUN)
    for method, (milliseconds,) in found.measured_ms.items():
        assert milliseconds >= 0.98 * found.objective_ms[method]
    mixed_cuts.show_measured([found], Console(width=200))
    assert f"{found.measured_ms['sequential'][0]:.2f}" in capsys.readouterr().out


@pytest.mark.full
def test_what_runs_waits_for_its_transfers():
    """Each transfer takes three times as long as all that a stage computes, also over the edge that skips a stage."""
    model = layers(1.0, 1.0, 1.0)
    model.content["edges"].append([0, 2])
    for node in model.content["nodes"][:2]:
        node["out_bytes"] = 3 * 10**7
    contender = contender_of("", model.graph("layers"), Partition({0: 0, 1: 1, 2: 2}, (0, 1, 2)))
    assert contender.transfer == pytest.approx((3e-3,) * 3)
    ((milliseconds,),) = RUN({"mixed": contender}).values()
    assert milliseconds >= 0.98 * 1000 * simulated(contender) > 2.9


def test_what_fits_only_mixed_is_said():
    """Two large layers between small ones fit on two devices only apart; the small ones are then not contiguous."""
    model = layers(*[1.0] * 4)
    for node, params in zip(model.content["nodes"], (3, 3, 1, 1), strict=True):
        node["params"] = params
    found = gain(model, 2, 1.0)
    assert found.text() == "mixed only" and sorted(found.objective_ms) == ["mixed"]
    model.content["nodes"].append({"id": 4, "fwd_ms": 1, "bwd_ms": 1, **LAYER, "params": 2})
    assert gain(model, 3, 0.5).text() == "nothing fits"


def test_grain_and_spread():
    """The largest layer over an even share; and half of the time of `5.5 x 6 + 6` ends in the fourth encoder layer."""
    grain, spread = mixed_cuts.shape_of(ENCODER_DECODER.graph("layers"), 3)
    first = 19.5 / 5.5
    assert grain == pytest.approx(5.5 * 3 / 39) and spread == pytest.approx((12 - first) / first)
    assert mixed_cuts.shape_of(layers(*[1.0] * 4).graph("layers"), 2) == pytest.approx((0.5, 1.0))


def test_a_partition_as_a_pipeline_has_the_times_of_its_graph():
    """Stages at the end do not recompute unless all stages wait; transfers, steps and other devices' edges count."""
    model = layers(4.0, 8.0, 4.0)
    last = model.content["nodes"][2]
    last |= {"fwd_plain_ms": 1.0, "bwd_plain_ms": 2.0, "mem_plain_bytes": 0}
    model.content["nodes"][0]["out_bytes"] = 10**7  # 1 ms
    graph, partition = model.graph("layers"), Partition({0: 0, 1: 1, 2: 2}, (0, 1, 0))
    found = contender_of("", graph, partition, step_milliseconds=0.5)
    assert found.forward == pytest.approx((1e-3, 2e-3, 1e-3)) and found.backward == pytest.approx((3e-3, 6e-3, 2e-3))
    assert found.transfer == pytest.approx((1e-3, 0)) and found.step == pytest.approx((5e-4,) * 3)
    assert contender_of("", graph, partition, order="gpipe").backward == pytest.approx((3e-3, 6e-3, 3e-3))
    assert contender_of("", graph, Partition({0: 0, 1: 1, 2: 2}, (0, 0, 1))).transfer == pytest.approx((0, 0))


def test_a_pipeline_that_drains_loses_what_the_formula_says():
    """(m + p - 1) / m for four equal stages and four microbatches."""
    graph = layers(*[4.0] * 4, num_devices=4).graph("layers")
    partition = Partition({i: i for i in range(4)}, (0, 1, 2, 3))
    waits, runs = (
        simulated(contender_of("", graph, partition, order=order, num_microbatches=4)) for order in ("gpipe", "async")
    )
    assert waits / runs == pytest.approx(1.75, rel=1e-6)
    assert runs == pytest.approx(4e-3) == of_busiest_rank(contender_of("", graph, partition))


def test_figure_4_is_the_same_graph():
    """The graph of `asynchronous` has these layers' times."""
    times = [node.milliseconds(plain=False) for node in figure_4(1e-3).nodes]
    assert times == pytest.approx([5.5] * 6 + [1.0] * 6)


def test_published_runs_divide_their_batches():
    """Each arm's microbatches are whole; the speed-ups of an outcome are seconds of gpipe over those of each arm."""
    for task in published_speedups.TASKS.values():
        assert all(task.batch % each == 0 for each in (task.gpipe, task.sequential, task.mixed or 1))
    seconds = {"gpipe": 6.0, "async sequential": 4.0, "async mixed": 2.0, "sync mixed": 5.0}
    found = published_speedups.Outcome(seconds, {}).speedups()
    assert found == pytest.approx(
        {"async sequential": 1.5, "async mixed": 3.0, "sync mixed": 1.2, "async over sync": 2.5}
    )
    model = layers(1.0, 2.0)
    model.content["nodes"][1] |= {"fwd_plain_ms": 0.5, "bwd_plain_ms": 1.0, "mem_plain_bytes": 0}
    graph = model.graph("layers")
    drained = published_speedups.drained(graph)
    assert [node.milliseconds(plain=True) for node in graph.nodes] == [1.0, 1.5]
    assert [node.milliseconds(plain=True) for node in drained.nodes] == [1.0, 2.0]


@pytest.mark.full
def test_an_uneven_model_is_captured_and_cut(capsys):
    """The command on one model, layers, two devices."""
    assert (
        mixed_cuts.main(["Whisper, 2 decoder layers", "--devices", "2", "--units", "layers", "--effort", "0.01"]) == 0
    )
    assert "gain by layers" in capsys.readouterr().out


def test_an_unknown_model_is_refused(capsys):
    with pytest.raises(SystemExit):
        mixed_cuts.main(["T5-giant"])
    assert "'T5-giant' is no model" in capsys.readouterr().err
