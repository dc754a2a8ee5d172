"""The search on small models: against all combinations, early stopping, order, reasons."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.pipeline.program.weight_policies import TWO_BW
from megatron.pipeline.schedules import PRESETS
from megatron.planner import Architecture, Cluster, Configuration
from megatron.planner.job.software import Software
from megatron.planner.search import SCOPES, Space, Training, search
from megatron.planner.search.space import offer, preset_of, schedules_on_device
from tests.draws import draws
from tests.planner.search.helper import PAPER, a100, gpt3, planner, run

SMALL = Architecture.gpt3(
    num_layers=12, hidden_size=512, num_attention_heads=12, sequence_length=256, vocabulary_size=8192
)


BPIPE_ON_TWO_SIZES = {
    "schedules": ("flush", "bpipe"), "tensor": (2, 4), "pipeline": (8, 16), "distributed_optimizer": (True,),
    "micro_batch_sizes": (1, 2), "rank_mappings": ("standard", "pair-adjacent"),
}  # fmt: skip


def cluster(memory_gib: float, *, nodes: int = 2, gpus: int = 6) -> Cluster:
    return Cluster(
        gpu="V100-16", nodes=nodes, gpus_per_node=gpus, memory_gib=memory_gib, bandwidth={"between_nodes": 3.0}
    )


def batch_of(batch: int, safe: int | None, size: int, d: int, group: int) -> int | None:
    """The batch that microbatches of this size make up, the largest that is safe; None where there is none."""
    if safe is None:
        return batch if batch % (size * d) == 0 else None
    if size & (size - 1) and batch % (size * d):  # powers of two are tried, and what divides the least batch
        return None
    count = safe // (size * d) // group * group
    return count * size * d if count * size * d >= batch else None


def every_combination(model: Architecture, machines: Cluster, batch: int, safe: int | None) -> dict:
    """What fits of the whole product, as far as schedules run it: by its choices, the verdict."""
    found = {}
    chosen = planner(model, machines, PAPER)
    sizes = range(1, machines.num_gpus + 1)
    for t, p, v, name, scope, split in itertools.product(
        sizes, sizes, (1, 2, 3, 4, 6, 12), schedules_on_device(), SCOPES, (True, False)
    ):
        if machines.num_gpus % (t * p) or machines.gpus_per_node % t or model.num_layers // p % v:
            continue
        d = machines.num_gpus // (t * p)
        preset, balance = preset_of(name)
        if PRESETS[preset].interleaves != (v > 1) or (split and d == 1) or (p == 1 and preset not in ("flush", "2bw")):
            continue
        for size in range(1, (safe or batch) + 1):
            whole = batch_of(batch, safe, size, d, group=p if v > 1 else 1)
            if whole is None:
                continue
            try:
                configuration = Configuration(
                    tensor=t, pipeline=p, data=d, virtual=v, micro_batch_size=size, global_batch_size=whole,
                    recompute=scope, schedule=preset, balance=balance, distributed_optimizer=split,
                    sequence_parallel=t > 1 and model.sequence_length % t == 0,
                )  # fmt: skip
                schedule = configuration.pipeline_schedule(tied_embeddings=model.tied_embeddings)
                schedule.validate(configuration.num_microbatches)
                if schedule.balance and not schedule.evicting_ranks((configuration.num_microbatches,) * (2 * p)):
                    continue
                verdict = chosen.judge(configuration, chosen.memory(configuration, proved=False))
                if not verdict.fits and offer(name).policy == TWO_BW and p > 1:
                    single = replace(configuration, single_gradient_buffer=True)
                    verdict = chosen.judge(single, chosen.memory(single, proved=False))
            except ValueError:
                continue
            if verdict.fits:
                found[t, p, d, v, name, scope, split, size] = verdict
    return found


def choices(outcome) -> dict:
    return {
        (
            each.choice.tensor, each.choice.pipeline, each.choice.data, each.choice.virtual, each.choice.schedule,
            each.choice.recompute, each.choice.distributed_optimizer, each.choice.micro_batch_size,
        ): each
        for each in outcome.kept
    }  # fmt: skip


@pytest.mark.full
@draws(2)
@given(memory=st.floats(0.15, 0.8), batch=st.sampled_from([(12, None), (24, None), (30, None), (6, 50)]))
@example(memory=0.4, batch=(6, 50))  # a larger microbatch may make up a smaller batch, and so need less memory
def test_nothing_that_fits_is_missed(memory, batch):
    """Without early stopping the search keeps exactly what fits of the product of all choices, whatever it skips."""
    machines, (least, safe) = cluster(memory), batch
    found = run(
        SMALL, machines, global_batch_size=least, safe_batch_size=safe, early_stopping=False,
        rank_mappings=("standard",),
    )  # fmt: skip
    expected = every_combination(SMALL, machines, least, safe)
    assert choices(found).keys() == expected.keys()
    assert memory > 0.4 or any(" misses " in each.reason for each in found.rejected)


@pytest.mark.full
@draws(2)
@given(memory=st.floats(0.15, 0.8))
def test_early_stopping_loses_no_speed(memory):
    """BPipe, 4.2: what early stopping leaves out recomputes or balances more than it needs, so the fastest stays. What
    recomputes more than another one is kept beside it only where moves of less are faster."""
    machines = cluster(memory)
    all_of_them = run(SMALL, machines, global_batch_size=24, early_stopping=False, num_simulated=1)
    found = run(SMALL, machines, global_batch_size=24, num_simulated=1)
    assert choices(found).keys() <= choices(all_of_them).keys()
    assert found.best is None or found.best.choice == all_of_them.best.choice
    considered = {each.choice: each for each in all_of_them.kept}
    for each in found.kept:
        for scope in SCOPES[: SCOPES.index(each.choice.recompute)]:
            without = considered.get(replace(each.choice, recompute=scope))
            faster = without and offer(each.choice.schedule).balance and each.estimate.seconds
            assert not without or without.estimate.under_pressure or faster < without.estimate.seconds


def test_moves_over_slow_links_do_not_end_the_trial_of_scopes():
    """Where moves are slow, recomputing more may be faster with balance; and balance that is asked for alone is not
    left out because its schedule fits without."""
    slow = Cluster(
        gpu="V100-16", nodes=4, gpus_per_node=4, memory_gib=0.4,
        bandwidth={"within_node": 1.0, "between_nodes": 0.1},
    )  # fmt: skip
    space = {
        "global_batch_size": 32, "schedules": ("bpipe",), "tensor": (2,), "pipeline": (4,),
        "rank_mappings": ("standard",), "num_simulated": 0,
    }  # fmt: skip
    found, all_of_them = (run(SMALL, slow, early_stopping=early, **space) for early in (True, False))
    assert found.best.choice == all_of_them.best.choice and found.best.choice.recompute is SCOPES[2]
    assert replace(found.best.choice, recompute=SCOPES[0]) in {each.choice for each in found.kept}
    both = run(SMALL, slow, **space | {"schedules": ("flush", "bpipe")})
    assert {each.choice.schedule for each in both.kept} == {"flush"}


def test_equal_times_are_ranked_by_memory():
    """On one GPU two weight versions gain nothing, so flush stands before 2bw."""
    outcome = run(SMALL, cluster(4.0, nodes=1, gpus=1), global_batch_size=8, num_simulated=0)
    assert [each.choice.schedule for each in outcome.kept[:2]] == ["flush", "2bw"]
    assert outcome.kept[0].sequences_per_second == pytest.approx(outcome.kept[1].sequences_per_second, rel=1e-12)


@pytest.mark.full
def test_the_smallest_first():
    """For memory the least memory that anything has stands first, of equals the fastest; cost ranks as time."""
    space = {"global_batch_size": 8, "early_stopping": False, "num_simulated": 2}
    fast = run(SMALL, cluster(0.9), **space)
    small = run(SMALL, cluster(0.9), objective="memory", **space)
    order = [(float(f"{each.memory_gib:.9g}"), -float(f"{each.sequences_per_second:.9g}")) for each in small.kept]
    assert order == sorted(order) and small.best.memory_gib == min(each.memory_gib for each in fast.kept)
    assert small.best.memory_gib < fast.best.memory_gib and small.best.is_simulated
    assert (fast.superlative, small.superlative) == ("fastest", "smallest")
    assert run(SMALL, cluster(0.9), objective="cost", **space).kept == fast.kept


@pytest.mark.full
def test_order_is_the_same_every_time():
    """From the fastest on; as many as were asked for are simulated, and nothing that is not stands before them."""
    first, second = (run(SMALL, cluster(0.9), global_batch_size=24, num_simulated=3) for _ in range(2))
    assert first == second and first.rejected
    speeds = [float(f"{each.sequences_per_second:.9g}") for each in first.kept]
    assert speeds == sorted(speeds, reverse=True)
    assert all(each.is_simulated for each in first.kept[:3])
    assert sum(each.is_simulated for each in first.kept) <= 12
    assert len({each.choice for each in first.kept}) == len(first.kept)


@pytest.mark.parametrize("num_simulated", [0, 3])
def test_slow_moves_are_known_with_and_without_a_simulation(num_simulated):
    """Across nodes they take longer than a forward, and the program waits for them: pairs within a node stand first."""
    outcome = run(
        gpt3(80, 9984, 104), a100(4), global_batch_size=128, num_simulated=num_simulated, **BPIPE_ON_TWO_SIZES
    )
    assert [each.choice.rank_mapping for each in outcome.kept[:2]] == ["pair-adjacent"] * 2
    assert sum(each.is_simulated for each in outcome.kept) >= num_simulated
    standard = [each for each in outcome.kept if each.choice.rank_mapping == "standard"]
    assert standard and all(each.sequences_per_second < outcome.kept[1].sequences_per_second for each in standard)


def test_the_best_are_those_of_the_very_programs():
    """A simulated estimate is the planner's of that configuration, with proved memory."""
    outcome = run(SMALL, cluster(0.9), global_batch_size=24, num_simulated=2)
    for each in outcome.kept[:2]:
        assert each.is_simulated
        again = planner(SMALL, cluster(0.9), PAPER).estimate(each.estimate.configuration, simulate=True)
        assert each.estimate == again


@pytest.mark.full
def test_reasons():
    """Each rejection names what is wrong, with its numbers, and the choices that it excludes."""
    outcome = run(gpt3(40, 5120, 40), a100(2), global_batch_size=24, num_simulated=1)
    said = {each.reason: each.choice for each in outcome.rejected}
    assert said["tensor parallelism over 16 GPUs leaves a node of 8"].tensor == 16
    assert said["a batch of 24 does not divide over 16 replicas"].data == 16
    assert said["p < 4 has nothing to balance"].schedule in ("bpipe", "2bw+balance")
    assert said["pipedream updates stages apart, and the embeddings are tied"].schedule == "pipedream"
    assert said["on one stage gpipe is flush"].pipeline == 1
    assert any(reason.startswith("interleaved takes microbatches in groups of") for reason in said)
    assert any(reason.startswith("2bw with 8 stages needs batches of at least 8 microbatches") for reason in said)
    assert any(reason.startswith("stage 0 misses ") and reason.endswith(" GiB") for reason in said)
    assert any(reason.startswith("with microbatches of ") and " misses " in reason for reason in said)
    assert any(reason == "recompute none fits, and recomputing more is slower" for reason in said)
    shallow = run(gpt3(12, 5120, 40), a100(2), global_batch_size=32, num_simulated=0, schedules=("flush",))
    said = {each.reason: each.choice for each in shallow.rejected}
    assert said["12 layers are fewer than 16 stages"].pipeline == 16
    heads = run(gpt3(40, 5200, 26), a100(1), global_batch_size=8, num_simulated=1)
    assert "26 attention heads do not divide by tensor parallel size 4" in {each.reason for each in heads.rejected}


def test_tensor_ranks_may_share_a_query_group():
    """Groups over ranks or ranks over groups, as megatron.core takes them; where neither divides, none."""
    shape = replace(Architecture.gpt3(
        num_layers=2, hidden_size=768, num_attention_heads=12, sequence_length=64, vocabulary_size=1000
    ), num_query_groups=2)  # fmt: skip
    assert [shape.undivided(t) for t in (1, 2, 4, 12)] == [None] * 4
    assert shape.undivided(3) == "2 query groups"


@pytest.mark.parametrize(
    ("space", "reason"),
    [
        ({"micro_batch_sizes": (3, 5)}, "the 4 sequences of a replica cannot be divided into microbatches of 3 or 5"),
        ({"micro_batch_sizes": (9,), "safe_batch_size": 12}, "the 6 sequences of a replica cannot hold "),
        ({"micro_batch_sizes": (3,), "pipeline": (1,)}, "the 1 sequence of a replica cannot be divided into"),
        ({"tensor": (1,), "pipeline": (1,), "global_batch_size": 1, "safe_batch_size": 7},
         "a batch of 7 is less than a sequence for each of 8 replicas"),
        ({"safe_batch_size": 7, "global_batch_size": 5, "micro_batch_sizes": (1,), "schedules": ("interleaved",)},
         "no batch from 5 to 7 divides into groups of 4 microbatches of 1"),
        ({"virtual": (5,)}, "3 layers of a rank do not divide into 5 stages"),
        ({"virtual": (1,)}, "interleaving takes 2 stages or more on a rank"),
        ({"pipeline": (4,), "layers": 4}, "the single layer of a rank makes no second stage"),
    ],
)  # fmt: skip
def test_reasons_of_a_narrow_space(space, reason):
    """What the user's own choices leave nothing of is said as it is."""
    space = {"tensor": (1,), "pipeline": (4,), "global_batch_size": 8, "num_simulated": 0} | space
    model = replace(SMALL, num_layers=space.pop("layers", 12))
    outcome = run(model, cluster(16.0, nodes=1, gpus=8), **space)
    assert any(each.reason.startswith(reason) for each in outcome.rejected)


def test_sizes_that_are_asked_for_are_tried_in_a_growing_batch():
    """Where a batch may grow, microbatches need not divide the least one."""
    space = {"global_batch_size": 8, "safe_batch_size": 50, "tensor": (1,), "pipeline": (4,), "num_simulated": 0}
    outcome = run(SMALL, cluster(16.0, nodes=1, gpus=8), micro_batch_sizes=(3,), schedules=("flush",), **space)
    assert {(each.choice.micro_batch_size, each.choice.global_batch_size) for each in outcome.kept} == {(3, 48)}


def test_the_fused_softmax():
    """Microbatches times heads that 4 does not divide are slow: said of what is kept, or a reason to reject."""
    model, machines = gpt3(8, 2600, 52), a100(1)
    space = {"global_batch_size": 8, "tensor": (2,), "pipeline": (2,), "schedules": ("flush",)}
    outcome = run(model, machines, num_simulated=1, **space)
    notes = {each.choice.micro_batch_size: each.notes for each in outcome.kept}
    assert notes[1] == ("fused softmax unavailable: 26 heads a rank",) and notes[2] == ()
    strict = run(model, machines, num_simulated=1, needs_fused_softmax=True, **space)
    assert {each.choice.micro_batch_size for each in strict.kept} == {2, 4}
    assert "fused softmax unavailable: 26 heads a rank" in {each.reason for each in strict.rejected}
    flash = run(model, machines, training=Training(saves_scores=False), num_simulated=1, **space)
    assert not any(each.notes for each in flash.kept)


def test_batches_up_to_the_safe_one():
    """PipeDream-2BW, 4.3: microbatches are accumulated up to B, so that 2bw runs where a batch was too small for it; a
    larger batch is never slower, and no batch is above B or below the least."""
    space = {"schedules": ("flush", "2bw", "interleaved"), "tensor": (1,), "pipeline": (4,), "num_simulated": 1}
    machines = cluster(16.0, nodes=1, gpus=8)
    small = run(SMALL, machines, global_batch_size=6, **space)
    assert {each.choice.schedule for each in small.kept} == {"flush"}
    large = run(SMALL, machines, global_batch_size=6, safe_batch_size=50, **space)
    assert {each.choice.schedule for each in large.kept} == {"flush", "2bw", "interleaved"}
    for each in large.kept:
        choice = each.choice
        step = choice.micro_batch_size * choice.data * (choice.pipeline if choice.schedule == "interleaved" else 1)
        assert 6 <= choice.global_batch_size <= 50 < choice.global_batch_size + step
    assert large.best.sequences_per_second > small.best.sequences_per_second


def test_pipedream_has_batches_of_one_microbatch():
    """It is tried where embeddings are untied and nothing is clipped, with the batch that a microbatch makes."""
    model = replace(SMALL, tied_embeddings=False)
    training = Training(clips_gradients=False)
    space = {"schedules": ("pipedream",), "tensor": (1,), "pipeline": (4,), "num_simulated": 1}
    outcome = run(model, cluster(16.0, nodes=1, gpus=8), training=training, global_batch_size=8, **space)
    assert {each.choice.micro_batch_size for each in outcome.kept} == {4}
    clipped = run(model, cluster(16.0, nodes=1, gpus=8), global_batch_size=8, **space)
    assert {each.reason for each in clipped.rejected} == {
        "pipedream updates stages apart, and gradients are clipped to a global norm"
    }


def test_pressure_can_be_avoided():
    """What the allocator slows down is flagged, or rejected."""
    space = {"global_batch_size": 128, "schedules": ("flush",), "tensor": (8,), "pipeline": (4,), "num_simulated": 1}
    flagged = run(gpt3(80, 9984, 104), a100(4), **space)
    assert any(each.estimate.under_pressure and "short of memory" in each.notes[-1] for each in flagged.kept)
    avoided = run(gpt3(80, 9984, 104), a100(4), avoids_pressure=True, **space)
    assert not any(each.estimate.under_pressure for each in avoided.kept)
    assert any("is short of memory, which slows it" in each.reason for each in avoided.rejected)


@pytest.mark.full
def test_mappings():
    """Pairs are put side by side where there are several nodes, and that is kept where they move activations or where
    it is faster, as for tied embeddings; the optimized mapping is tried for the best, and kept where it gains; on one
    node, or where tensor ranks fill it, there is nothing to choose."""
    model, machines = gpt3(16, 4096, 32), a100(4)
    space = {"global_batch_size": 32, "schedules": ("bpipe", "flush"), "early_stopping": False, "num_simulated": 1}
    mappings: dict = {}
    for each in run(model, machines, **space, tensor=(4, 8), pipeline=(4,)).kept:
        mappings.setdefault((each.choice.tensor, each.choice.schedule), set()).add(each.choice.rank_mapping)
    assert {"standard", "pair-adjacent"} <= mappings[4, "bpipe"]
    assert "pair-adjacent" in mappings[4, "flush"]
    tied = run(SMALL, cluster(0.9), global_batch_size=24, schedules=("flush",), tensor=(1,), num_simulated=0)
    rates = {each.choice: each.sequences_per_second for each in tied.kept}
    adjacent = [choice for choice in rates if choice.rank_mapping == "pair-adjacent"]
    assert adjacent and all(rates[each] > rates[replace(each, rank_mapping="standard")] for each in adjacent)
    assert "the standard rank order is as fast" in {each.reason for each in tied.rejected}
    assert mappings[8, "bpipe"] == mappings[8, "flush"] == {"standard"}
    one = run(model, a100(1), **space, tensor=(2,), pipeline=(4,))
    assert {each.choice.rank_mapping for each in one.kept} == {"standard"}
    alone = run(model, machines, **space | {"rank_mappings": ("optimized",)}, tensor=(4,), pipeline=(4,))
    assert {each.choice.rank_mapping for each in alone.kept} == {"optimized"}
    gains = run(SMALL, cluster(0.9), global_batch_size=24, num_simulated=3)
    found = {each.choice: each for each in gains.kept}
    optimized = [choice for choice in found if choice.rank_mapping == "optimized"]
    assert optimized
    for choice in optimized:
        assert found[choice].is_simulated
        assert found[choice].estimate.seconds < found[replace(choice, rank_mapping="standard")].estimate.seconds


def test_the_program_has_the_last_word():
    """What the training program refuses is rejected in its words."""
    space = Space(num_gpus=8, gpus_per_node=8, global_batch_size=8, schedules=("flush",))
    machines = cluster(16.0, nodes=1, gpus=8)

    def refuse(configuration: Configuration) -> str | None:
        return "no two stages today" if configuration.pipeline == 2 else None

    outcome = search(space, lambda _: planner(SMALL, machines, PAPER), Training(), num_simulated=1, refuse=refuse)
    assert {each.choice.pipeline for each in outcome.kept} == {1, 4, 8}
    assert {each.choice.pipeline for each in outcome.rejected if each.reason == "no two stages today"} == {2}


def test_what_the_program_refuses_does_not_end_the_trial_of_scopes():
    space = Space(num_gpus=8, gpus_per_node=8, global_batch_size=8, schedules=("flush",))
    machines = cluster(16.0, nodes=1, gpus=8)

    def refuse(configuration: Configuration) -> str | None:
        return "recompute something" if configuration.recompute is SCOPES[0] else None

    outcome = search(space, lambda _: planner(SMALL, machines, PAPER), Training(), num_simulated=0, refuse=refuse)
    assert {each.choice.recompute for each in outcome.kept} == {SCOPES[1]}


def test_a_search_says_how_far_it_is():
    """Progress ends with all of it, in few calls."""
    calls = []
    space = Space(num_gpus=8, gpus_per_node=8, global_batch_size=8, schedules=("flush",))
    machines = cluster(16.0, nodes=1, gpus=8)
    search(
        space, lambda _: planner(SMALL, machines, PAPER), Training(), num_simulated=2,
        progress=lambda *call: calls.append(call),
    )  # fmt: skip
    assert ("configurations", 10, 10) in calls and calls[-1][0] == "simulations" and calls[-1][2] == 2
    assert all(0 <= done <= total for _, done, total in calls)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schedules": ("zigzag",)}, "there is no schedule 'zigzag'; choose from gpipe, "),
        ({"rank_mappings": ("random",)}, "there is no rank mapping 'random'; choose from standard, "),
        ({"safe_batch_size": 4}, "below the batch of 8"),
        ({"tensor": (3, 5)}, "8 GPUs do not divide by tensor 3 or 5; give"),
        ({"tensor": (4,), "pipeline": (4,)}, "8 GPUs do not divide by tensor 4 times pipeline 4; give"),
    ],
)
def test_refusals(changes, reason):
    with pytest.raises(ValueError, match=reason):
        Space(num_gpus=8, gpus_per_node=8, global_batch_size=8, **changes)


@pytest.mark.full
def test_halves_are_searched_by_the_layers_that_train_them():
    """Where other layers train split backwards, these keep scores that the scope attention recomputes, and whole ones
    do not: so that scope is tried for zb-h1 and zbv alone, and floors of memory are of each."""
    training = Training(saves_scores=False, saves_scores_with_halves=True)
    found = run(
        SMALL, cluster(0.6), training=training, global_batch_size=24, num_simulated=0, early_stopping=False,
        schedules=("flush", "interleaved", "zb-h1", "zbv"), rank_mappings=("standard",),
    )  # fmt: skip
    attention = {each.choice.schedule for each in found.kept if each.choice.recompute is SCOPES[1]}
    assert attention == {"zb-h1", "zbv"}
    assert {each.choice.virtual for each in found.kept if each.choice.schedule == "zbv"} == {2}
    same = run(
        SMALL, cluster(0.6), global_batch_size=24, num_simulated=0, early_stopping=False, schedules=("flush", "zb-h1"),
        rank_mappings=("standard",),
    )  # fmt: skip
    assert {each.choice.schedule for each in same.kept if each.choice.recompute is SCOPES[1]} == {"flush", "zb-h1"}


@pytest.mark.full
def test_2bw_gives_up_a_gradient_buffer_where_that_makes_it_fit():
    """Only where two do not fit, and not where a loss scale or predictions forbid it."""
    model, machines = gpt3(84, 11520, 120), a100(6)
    space = {"global_batch_size": 192, "schedules": ("2bw",), "num_simulated": 1}
    found = run(model, machines, Software(), Training(scales_loss=False), **space)
    single = [each for each in found.kept if each.choice.single_gradient_buffer]
    assert single and any(not each.choice.single_gradient_buffer for each in found.kept)
    missed = {each.choice for each in found.rejected if each.missing_gib}
    for each in single:
        unmapped = replace(each.choice, single_gradient_buffer=False, rank_mapping=None)
        assert unmapped in missed and each.estimate.fits
    for training, more in (
        (Training(scales_loss=True), {}),
        (Training(scales_loss=False), {"predictions": {"provisional": "stage"}}),
    ):
        other = run(model, machines, Software(), training, **space, **more)
        assert not any(each.choice.single_gradient_buffer for each in other.kept)
