"""What papers/l2l computes: closed forms, and tables of runs that are the program. No times."""

import shlex
import statistics
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron import backend
from megatron.pipeline.simulate import Costs, simulate

backend.install()  # before what imports megatron.core

from papers.l2l import captured, compute, lanes, memory, optimizer
from papers.l2l import model as models
from tests.benchmarks.test_emulated import rows_of
from tests.draws import draws
from tests.pipeline.check.hosted import hosted

SECONDS = st.sampled_from((0, 1, 2, 3, 5, 8, 13, 21))


@draws(60)
@given(
    st.integers(2, 8), st.integers(1, 5), st.sampled_from(("eager", "deferred")), SECONDS, SECONDS, SECONDS, SECONDS
)  # fmt: skip
def test_a_steady_batch_takes_what_the_closed_form_says(N, u, update, X, G, R, U):
    """Exactly where it says so, elsewhere no longer; the computation and the paper's sum are never above what they
    bound.
    """
    form = lanes.Relay(N=N, u=u, update=update, C=1, X=X, G=G, R=R, U=U)
    costs = Costs(forward=1, backward=2, fetch=X, store=G, reduce_grad=R, update=U)
    simulated = simulate(hosted(1, N, update=update, data_parallel=True).build((u,) * 4), costs)
    found = lanes.steady_batches(simulated)
    assert len(found) == 2
    assert form.computation <= min(found) and max(found) <= form.batch
    if form.is_exact:
        assert found == [form.batch] * 2


def test_the_closed_form_by_hand():
    """Three stages of two microbatches, all else hidden; 1.5 of the computation where updates behind the norm are as
    long as a stage's backwards; equation 4 adds up what the relay overlaps.
    """
    Relay = lanes.Relay
    form = Relay(N=3, u=2, update="eager", C=1, X=2, G=1, R=1, U=3)
    assert (form.computation, form.batch, form.paper) == (22, 2 + 2 * 2 + 6 + 2 * 6 + 1 + 1 + 3, 3 * 12)
    deep = {update: Relay(N=1000, u=4, update=update, C=1, X=4, G=6, R=6, U=12) for update in ("eager", "deferred")}
    assert deep["eager"].batch / deep["eager"].computation == pytest.approx(1.0, abs=0.01)
    assert deep["deferred"].batch / deep["deferred"].computation == pytest.approx(1.5, abs=0.01)


@pytest.mark.full
def test_emulated_lanes_run_the_program(tmp_path):
    """Each bottleneck with eager and deferred updates: what ran is the program, no run is shorter than simulated, and
    the simulator agrees with the closed form. (How much longer depends on the machine, so the status may be 1.)
    """
    arguments = "lanes --only bottlenecks --microbatches 2 --stages 4 --forward 1"
    rows = rows_of("papers.l2l", arguments, tmp_path, statuses=(0, 1))
    assert [(row["case"], row["update"]) for row in rows] == [
        (name, update) for name in ("compute", "fetch", "store", "update") for update in ("eager", "deferred")
    ]
    for row in rows:
        assert row["executed_is_program"]
        assert row["whole"] >= 0.999 * row["least"]
        assert row["over_simulated"] == statistics.median(row["measured"]) / row["simulated"]
        assert row["simulated"] == pytest.approx(row["formula"])


@pytest.mark.full
def test_emulated_lanes_of_four_ranks(tmp_path):
    """The same on four ranks, whose computation is that of one without the last stage, with short copies and long."""
    rows = rows_of("papers.l2l", "lanes --only ranks --forward 1", tmp_path, statuses=(0, 1))
    assert [(row["case"], row["update"]) for row in rows] == [
        (f"4 ranks, copies of {share}", update) for share in ("0.125", "0.5") for update in ("eager", "deferred")
    ]
    for row in rows:
        assert (row["ranks"], row["stages"], row["formula"]) == (4, 16, None)
        assert row["executed_is_program"] and row["ideal"] == pytest.approx(0.128)
        assert row["whole"] >= 0.999 * row["least"]


def test_complaints_name_what_is_off():
    """Another program than was simulated, a time more than 2% away on either side, and more of the computation than the
    goal allows."""
    good = {"case": "fetch", "microbatches": 4, "update": "eager", "executed_is_program": True, "over_simulated": 1.019,
            "over_ideal": 1.02, "most": 1.03}  # fmt: skip
    complaints = lanes.complaints
    assert complaints([good]) == []
    for change, words in (
        ({"executed_is_program": False}, "something else than the program"),
        ({"over_simulated": 1.021}, "1.0210 of the simulated time"),
        ({"over_simulated": 0.979}, "0.9790 of the simulated time"),
        ({"over_ideal": 1.031}, "1.031 of its computation, above 1.03"),
    ):
        (sentence,) = complaints([{**good, **change}])
        assert words in sentence and "fetch, u=4, eager" in sentence


@pytest.mark.full  # test_relay_memory has the same meter
def test_device_bytes_grow_by_m_inputs_a_layer():
    """With three stages more by 3m inputs, or by nothing where these wait on the host: else there is a complaint."""
    rows = memory.depth_rows(SimpleNamespace(layers=[3, 6], hidden=16, microbatches=2))
    assert len(rows) == 2 * (1 + len(memory.RELAYS)) and memory.complaints(rows) == []
    (sentence,) = memory.complaints([{**rows[-1], "growth": 4}])
    assert "l2l, inputs on the host of 6 layers" in sentence


@pytest.mark.full
def test_the_models_are_trained_alike():
    """What the benchmarks compare: the relay, eager and deferred, has the losses of flush to the last bit, and the
    model as many parameters as it says.
    """
    model = models.Model(layers=3, hidden=16, sequence=8, vocabulary=32)
    contenders = [models.Flush(model), *(models.Relay(model, update=update) for update in ("eager", "deferred"))]
    losses = [[each.run(m) for m in (2, 3, 1)] for each in contenders]
    for each in contenders:
        each.close()
    assert losses[0] == losses[1] == losses[2] and len(set(losses[0])) == 3
    built = [models.stage_module(model, index) for index in range(3)]
    assert sum(each.numel() for stage in built for each in stage.parameters()) == model.num_parameters


@pytest.mark.full
def test_flush_dies_where_the_relay_trains(tmp_path):
    """Under one limit on private memory: flush at 36 layers, not at 6; the relay at both, with the losses of flush."""
    rows = rows_of("papers.l2l", "memory --only limit --limited-layers 6 36 --headroom 256", tmp_path)
    died = {(row["contender"], row["layers"]): row["died"] for row in rows}
    assert [each for each, reason in died.items() if reason] == [("flush", 36)]
    assert "can't allocate memory" in died["flush", 36]
    for row in rows:
        assert len(row["losses"]) == 2
        assert row["limited_losses"] == ([] if row["died"] else row["losses"])


def test_what_a_limit_has_to_show():
    """Complaints: a relay that dies, a limit under which nothing dies, losses that differ."""
    complaints = memory.complaints
    row = {"section": "limit", "layers": 8, "losses": [1.0], "limited_losses": [1.0], "died": None}
    good = [{**row, "contender": "flush", "died": "no memory", "limited_losses": []}, {**row, "contender": "l2l"}]
    assert complaints(good) == []
    assert "died under the limit: no memory" in complaints([good[0], {**good[1], "died": "no memory"}])[0]
    assert "shows nothing" in complaints([{**row, "contender": "flush"}, good[1]])[0]
    changed = {**good[1], "losses": [1.5]}
    assert [words for words in ("the limit changed", "other losses") for each in complaints([good[0], changed])
            if words in each] == ["the limit changed", "other losses"]  # fmt: skip


def test_the_limit_of_the_hosts_optimizer():
    """An addition to 1 GB in 0.15 s moves 20 GB/s, at which 28 bytes take 1.4 ns."""
    found = {"parameters": 1000, "stream_bytes": 10**9, "stream": [0.15] * 3, "loop": [9e-6], "foreach": [7e-6],
             "fused": [2.8e-6]}  # fmt: skip
    rows = {row["kernel"]: row for row in optimizer.rows_of(found, 2)}
    assert rows["limit"]["nanoseconds"] == pytest.approx([1.4] * 3)
    assert rows["limit"]["bandwidth"] == pytest.approx([2e10] * 3)
    assert rows["fused"]["nanoseconds"] == pytest.approx([2.8]) and rows["fused"]["over_limit"] == pytest.approx(2)
    assert rows["loop"]["over_limit"] == pytest.approx(9 / 1.4)


@pytest.mark.full
def test_real_computation_beside_flush(tmp_path):
    """The relay trains in a process of its own, in turns with flush, and so does one whose batch is one microbatch: the
    same losses, far fewer bytes of state on the device, and as many moved as 2N - 2 fetches and N gradients have, with
    however many microbatches. (How fast depends on the machine.)
    """
    arguments = (
        "compute --contenders l2l\\ eager --cores 1 --rounds 1 --layers 6 --hidden 32 --sequence 8 --microbatches 2"
    )
    rows = rows_of("papers.l2l", arguments, tmp_path, statuses=(0, 1))
    flush, relay, at_once = rows
    assert [(row["contender"], row["microbatches"]) for row in rows] == [
        ("flush", 2), ("l2l eager", 2), ("l2l eager, one microbatch", 1)
    ]  # fmt: skip
    assert relay["losses"] == flush["losses"] and len(flush["losses"]) == 2
    assert at_once["losses"] == pytest.approx(flush["losses"], rel=1e-6)  # other sums of the same samples
    assert at_once["state"] == relay["state"] and at_once["moved"] == relay["moved"]
    model = models.Model(layers=6, hidden=32, sequence=8)
    assert flush["state"] == 16 * model.num_parameters
    assert relay["state"] < flush["state"] / 2
    ends = 2 * model.num_parameters - model.layers * model.layer_parameters * 2  # the embedding comes and goes twice
    layer = 4 * model.layer_parameters
    assert relay["moved"] >= (3 * model.layers - 2) * layer
    assert relay["moved"] < 1.02 * ((3 * model.layers - 2) * layer + 8 * ends)


def test_losses_decide_what_is_compared():
    """Complaints: another loss, a relay's that is not the same to the last bit, one that is too slow; a contender that
    cannot run here is no complaint.
    """
    complaints = compute.complaints
    row = {"cores": 1, "failed": None, "losses": [5.0, 4.0], "over_flush": [0.96]}
    flush = {**row, "contender": "flush", "over_flush": [1.0]}
    relay, peer = ({**row, "contender": name} for name in ("l2l eager", "ZeRO-Offload"))
    assert complaints([flush, relay, peer, {**peer, "failed": "ModuleNotFoundError"}]) == []
    assert "to the last bit" in complaints([flush, {**relay, "losses": [5.0, 4.000001]}])[0]
    assert "not those of flush" in complaints([flush, {**peer, "losses": [5.0, 4.1]}])[0]
    assert "0.940 of the speed" in complaints([flush, {**relay, "over_flush": [0.94]}])[0]


@pytest.mark.full
def test_a_captured_llama_beside_flush_and_fsdp(tmp_path):
    """The rows and files of one run: relays with the losses of flush to the last bit, FSDP2 with activation
    checkpointing within 1e-5. Inputs that wait on the host cross twice, and everything else is equal. FSDP2 moves
    weights twice for each microbatch and gradients once. (How fast depends on the machine.)
    """
    names = ["l2l", "l2l, inputs on the device", "FSDP2, CPUOffloadPolicy"]
    arguments = f"captured --contenders {' '.join(map(shlex.quote, names))} --rounds 1 --layers 4 --hidden 32"
    rows = rows_of("papers.l2l", f"{arguments} --sequence 16 --microbatches 3", tmp_path, statuses=(0, 1))
    assert [(row["contender"], row["failed"]) for row in rows] == [(name, None) for name in ("flush", *names)]
    flush, hosted, kept, fsdp = rows
    assert hosted["losses"] == kept["losses"] == flush["losses"] and len(set(flush["losses"])) == 2
    assert fsdp["losses"] == pytest.approx(flush["losses"], rel=1e-5)
    layer, ends = 4 * 32**2 + 3 * 4 * 32**2 + 2 * 32, 2 * captured.VOCABULARY * 32 + 32
    assert flush["state"] == 16 * (4 * layer + ends)
    boundary = 4 * 2 * 16 * 32
    assert 0 < hosted["moved"] - kept["moved"] <= 2 * 4 * 3 * boundary
    assert (hosted["moved"] - kept["moved"]) % (2 * 3 * boundary) == 0
    assert fsdp["moved"] == 3 * 4 * (3 * 4 * layer + 2 * ends + ends)
    assert hosted["moved"] < fsdp["moved"] / 2


def test_a_peer_that_is_ahead_is_a_complaint():
    complaints, fsdp_name = captured.complaints, captured.PEERS["FSDP2"]
    row = {"failed": None, "losses": [5.0, 4.0], "seconds": [1.0, 1.0], "state": 10, "made": 10, "moved": 10}
    flush = {**row, "contender": "flush", "moved": 0}
    relay = {**row, "contender": "l2l"}
    fsdp = {**row, "contender": fsdp_name, "seconds": [1.2, 1.1], "losses": [5.0, 4.00001]}
    assert complaints(captured.with_peers([flush, relay, fsdp])) == []
    for change, words in (
        ({"seconds": [0.9, 0.9]}, "l2l: 0.900 of the speed"),
        ({"made": 9}, "l2l: 20 bytes on the device, and FSDP2, CPUOffloadPolicy has 19"),
        ({"moved": 9}, "l2l: 10 bytes moved"),
        ({"losses": [5.0, 4.1]}, "not those of flush"),
    ):
        (sentence,) = complaints(captured.with_peers([flush, relay, {**fsdp, **change}]))
        assert words in sentence
    (sentence,) = complaints(captured.with_peers([flush, {**relay, "losses": [5.0, 4.000001]}, fsdp]))
    assert "l2l: its losses" in sentence
    found = captured.with_peers([flush, relay, fsdp])
    assert found[1]["over"] == {fsdp_name: [1.2, 1.1]} and captured.with_peers([{**flush}])[0]["over"] == {}
