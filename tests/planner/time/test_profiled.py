"""Costs from a profile: put together rightly, and refused where it cannot say."""

from dataclasses import replace

import pytest

from megatron.commands.grid_search.trial_results import predicted_seconds
from megatron.planner import Configuration
from megatron.planner.memory.parameters import stage_parameters
from megatron.planner.time.profile import StagePosition
from megatron.planner.time.profiled import PASS_OF_STEP, ProfiledCosts, software_of
from tests.planner import profiles
from tests.planner.profiles import CONTENTION, HOST_FUSED, HOST_LOOP, LATENCY, MODEL, TO_HOST, UPDATE, forward

PROFILE = profiles.profile()
COSTS = ProfiledCosts(PROFILE, MODEL)


def configuration(**changes):
    return Configuration(**({"micro_batch_size": 2, "global_batch_size": 16} | changes))


def test_one_rank_takes_its_microbatches_and_its_update():
    """p = t = d = 1: m (f + b) and the update."""
    expected = 8 * 3 * forward(StagePosition.ONLY, 4, 2, 1) + 4 * UPDATE
    assert predicted_seconds(PROFILE, configuration(), num_layers=4) == pytest.approx(expected)


def test_tensor_ranks_work_together():
    """t = 2: the times of two ranks at work, which hold their all-reduces; two versions where the policy has them."""
    expected = 8 * 3 * forward(StagePosition.ONLY, 4, 2, 2, tensor=2) + 4 * UPDATE
    found = predicted_seconds(PROFILE, configuration(tensor=2), num_layers=4)
    assert found == pytest.approx(expected + COSTS.costs(configuration(tensor=2), (4,)).reduce_norm)


def test_2bw_costs_are_those_of_ranks_that_always_work():
    """Balanced stages without bubble: nobody ever works alone, so times are those of two at work."""
    even = replace_ends(profiles.profile())
    found = predicted_seconds(even, configuration(pipeline=2, schedule="2bw"), num_layers=4)
    expected = 8 * 3 * forward(StagePosition.MIDDLE, 2, 2, 2) + 2 * 2 * UPDATE
    assert found == pytest.approx(expected, rel=1e-2)  # transfers are short, and not all hidden at m = 4 p


def replace_ends(profile):
    """The profile with the middle's times at every place."""
    middle = {(each.num_layers, each.tensor, each.micro_batch_size, each.working): each for each in profile.stages
              if each.place is StagePosition.MIDDLE}  # fmt: skip
    stages = tuple(
        middle[each.num_layers, each.tensor, each.micro_batch_size, each.working].model_copy(
            update={"place": each.place}
        )
        for each in profile.stages
    )
    return profile.model_copy(update={"stages": stages})


def test_a_flush_is_faster_while_ranks_wait():
    """The costs lie between those of one and of two at work, the nearer to one the more the ranks wait."""
    alone, together = forward(StagePosition.FIRST, 2, 2, 1), forward(StagePosition.FIRST, 2, 2, 2)
    few, many = (
        ProfiledCosts(PROFILE, MODEL).costs(configuration(pipeline=2, global_batch_size=2 * m), (2, 2)).forward[0]
        for m in (1, 64)
    )
    assert alone == pytest.approx(few)
    assert few < many < together and together - many < 0.1 * (together - alone)


def test_edges_carry_activations_at_measured_speed():
    """FP32: 4 bytes an element of [sequence, microbatch, hidden]."""
    costs = COSTS.costs(configuration(pipeline=2), (2, 2))
    assert costs.forward_bytes == 32 * 2 * 64 * 4
    assert costs.latency + costs.forward_bytes / costs.bandwidth == pytest.approx(LATENCY + costs.forward_bytes / 1e9)


def test_replicas_and_tied_embeddings_reduce():
    """Gradients over d ranks; the embedding, without positions, over the first and the last stage."""
    costs = COSTS.costs(configuration(pipeline=2, data=2), (2, 2))
    counts = stage_parameters(MODEL, 1, (2, 2))
    assert costs.reduce_grad == pytest.approx([2 * LATENCY + 4 * count / 1e9 for count in counts])
    assert costs.reduce_embed == pytest.approx(2 * LATENCY + 4 * 128 * 64 / 1e9)
    untied = ProfiledCosts(
        profiles.profile(model=replace(MODEL, tied_embeddings=False)), replace(MODEL, tied_embeddings=False)
    )
    assert untied.costs(configuration(pipeline=2), (2, 2)).reduce_embed == 0


def test_the_distributed_optimizer_shares_the_update_and_gathers():
    """Each of two replicas steps half, reduces by a reduce-scatter and gathers in the STEP: half an all-reduce each."""
    plain, shared = (COSTS.costs(configuration(data=2, distributed_optimizer=on), (4,)) for on in (False, True))
    gather = (2 * LATENCY + 4 * stage_parameters(MODEL, 1, (4,))[0] / 1e9) / 2
    assert plain.step[0] == pytest.approx(4 * UPDATE) and shared.step[0] == pytest.approx(2 * UPDATE + gather)
    assert shared.reduce_grad[0] == pytest.approx(gather) == pytest.approx(plain.reduce_grad[0] / 2)


def test_predictions_from_the_measured_update():
    """On a CPU it is a pass. On a GPU a step on copies moves 68 bytes where the step moves 36, in FP32. Two replicas of
    the distributed optimizer take half each, and gather there. Gradients are kept in twice the time in which they are
    zeroed.
    """
    base = profiles.profile()
    zeroed = base.model_copy(update={"updates": tuple(
        each.model_copy(update={"zero": profiles.exactly(0.001 * each.num_layers)}) for each in base.updates
    )})  # fmt: skip
    model = ProfiledCosts(zeroed, MODEL)
    asked = {"schedule": "2bw", "data": 2}
    plain, predicted = (model.costs(configuration(**asked, provisional=mode), (4,)) for mode in ("off", "stage"))
    assert plain.predict == plain.hold == [0.0] and predicted.step == plain.step
    assert predicted.predict[0] == pytest.approx(2 * 4 * UPDATE * PASS_OF_STEP)
    on_gpu = ProfiledCosts(zeroed.model_copy(update={"shares_processor": False}), MODEL)
    copied = on_gpu.costs(configuration(**asked, provisional="stage"), (4,))
    assert copied.predict[0] == pytest.approx(2 * 4 * UPDATE * 68 / 36)
    assert predicted.hold[0] == pytest.approx(2 * 4 * 0.001)
    split = model.costs(configuration(**asked, provisional="stage", distributed_optimizer=True), (4,))
    gather = (2 * LATENCY + 4 * stage_parameters(MODEL, 1, (4,))[0] / 1e9) / 2
    assert split.predict[0] == pytest.approx(predicted.predict[0] / 2 + gather)
    assert split.step[0] == pytest.approx(4 * 0.001 + 4 * UPDATE)


UNIFORM = {"provisional": "uniform", "provisional_microbatches": 1}


@pytest.mark.parametrize(
    ("dtype", "mode", "takes"),
    [
        ("float32", {"provisional": "stage"}, 1),
        ("float32", UNIFORM, 0),
        ("bfloat16", UNIFORM, 0),
        ("float16", UNIFORM, 1),
        ("float32", {"provisional": "stage", "provisional_reduce": True}, 1 / 2),
    ],
)
def test_predictions_take_the_norm_to_clip_by_or_to_look_for_overflows(dtype, mode, takes):
    """On every replica that of all gradients, but of its shards where the mean of all is read."""
    base = profiles.profile()
    found = []
    for seconds in (0.0, 0.002):
        updates = tuple(
            each.model_copy(update={"norm": profiles.exactly(seconds * each.num_layers)}) for each in base.updates
        )
        model = ProfiledCosts(base.model_copy(update={"updates": updates, "dtype": dtype}), MODEL)
        asked = {"schedule": "2bw", "data": 2, **mode, "distributed_optimizer": True}
        found.append(model.costs(configuration(**asked), (4,)).predict[0])
    assert found[1] - found[0] == pytest.approx(takes * 4 * 0.002)


def test_predictions_settle_where_ranks_share_a_processor():
    """Balanced stages that always work: a batch takes that of 2bw and the prediction."""
    even = replace_ends(profiles.profile())
    plain, predicted = (
        predicted_seconds(even, configuration(pipeline=2, schedule="2bw", provisional=mode), num_layers=4)
        for mode in ("off", "stage")
    )
    assert predicted - plain == pytest.approx(2 * 2 * UPDATE * PASS_OF_STEP, rel=1e-2)


def test_balanced_activations_move_at_measured_speed():
    costs = COSTS.costs(configuration(pipeline=4, schedule="bpipe", global_batch_size=16), (1, 1, 1, 1))
    assert all(move > LATENCY for move in costs.evict) and costs.evict[0] > costs.evict[1]


def test_processors_of_their_own_need_no_settling():
    """On GPUs a stage takes the same whoever else works."""
    own = ProfiledCosts(profiles.profile(counts=(4,), shares_processor=False), MODEL)
    costs = own.costs(configuration(pipeline=4, global_batch_size=32), (1, 1, 1, 1))
    assert costs.forward[1] == pytest.approx(forward(StagePosition.MIDDLE, 1, 2, 4))
    assert costs.forward[1] / forward(StagePosition.MIDDLE, 1, 2, 1) == pytest.approx(1 + 3 * CONTENTION)


def test_any_number_of_layers_of_the_same_model():
    """More layers are fine; another width is another model."""
    ProfiledCosts(PROFILE, replace(MODEL, num_layers=96))
    with pytest.raises(ValueError, match="hidden_size 64, not 128; profile this model"):
        ProfiledCosts(PROFILE, replace(MODEL, hidden_size=128))


@pytest.mark.parametrize(
    ("changes", "layers", "message"),
    [
        ({"tensor": 2, "sequence_parallel": True}, (4,), "without --sequence-parallel"),
        ({"micro_batch_size": 8}, (4,), "microbatches of 8"),
        ({"data": 8}, (4,), "--processes 8"),
        ({"recompute": "layer"}, (4,), "recompute layer"),
        ({"schedule": "l2l", "virtual": 4, "data": 8}, (1,) * 4, "--processes 8"),
    ],
)
def test_what_was_not_profiled_is_refused(changes, layers, message):
    with pytest.raises(ValueError, match=message):
        COSTS.costs(configuration(**changes), layers)


def relayed(**changes):
    return configuration(**{"schedule": "l2l", "virtual": 4} | changes)


@pytest.mark.parametrize(("flags", "per_parameter"), [((), HOST_LOOP), (("--optimizer-kernel", "fused"), HOST_FUSED)])
def test_weights_on_the_host_cost_what_their_copies_and_updates_do(flags, per_parameter):
    """Weights come, gradients and inputs leave at the rates of their directions, for one process and for two replicas,
    which share a store; updates are by the kernel that the profile's flags choose. Nothing steps on the device.
    """
    costs = ProfiledCosts(profiles.profile(flags=(*PROFILE.flags, *flags)), MODEL)
    counts = stage_parameters(MODEL, 1, (1,) * 4)
    for replicas in (1, 2):
        found = costs.costs(relayed(data=replicas), (1,) * 4)
        slower = 1 + CONTENTION * (replicas - 1)
        assert found.fetch == pytest.approx([slower * 4 * count / TO_HOST for count in counts])
        assert found.store == pytest.approx([slower * 2 * 4 * count / TO_HOST / replicas for count in counts])
        assert found.update == pytest.approx([slower * count * per_parameter / replicas for count in counts])
        boundary = 2 * MODEL.sequence_length * MODEL.hidden_size * 4
        assert found.reload == pytest.approx([slower * boundary / TO_HOST] * 4)
        assert found.offload == pytest.approx([slower * 2 * boundary / TO_HOST] * 4)
        assert not any(found.step)


def test_a_relay_is_predicted_from_a_profile():
    """On one rank the simulation of its costs, of which computation is most; two ranks take about half of it, and a
    profile of one process, which has no transfers, does for one rank.
    """
    alone = profiles.profile(counts=(1,), transfers=(), all_reduces=())
    one = predicted_seconds(alone, relayed(), num_layers=4)
    forwards = [
        forward(place, 1, 2, 1)
        for place in (StagePosition.FIRST, StagePosition.MIDDLE, StagePosition.MIDDLE, StagePosition.LAST)
    ]
    least = 8 * (3 * sum(forwards) + sum(forwards[:-1]))
    assert least < one < 1.01 * least
    two = predicted_seconds(PROFILE, relayed(pipeline=2, virtual=2), num_layers=4)
    assert 0.5 * one < two < 0.9 * one


def test_a_profile_from_before_says_so():
    with pytest.raises(ValueError, match=r"no copies between host and device.*write it anew with tools/profile_model"):
        ProfiledCosts(profiles.profile(copies=(), host_updates=()), MODEL).costs(relayed(), (1,) * 4)


def test_memory_counts_the_profiled_precision():
    assert software_of(PROFILE).element_bytes == 4
    assert software_of(profiles.profile(dtype="bfloat16")).element_bytes == 2


def test_flash_attention_is_that_of_the_profiled_program():
    """With Transformer Engine in 16 bits, unless the flags ask for another attention."""
    engine = {"dtype": "bfloat16", "transformer_impl": "transformer_engine"}
    assert software_of(profiles.profile(**engine)).flash_attention
    assert not software_of(profiles.profile(**engine, flags=("--attention-backend", "unfused"))).flash_attention
    assert not software_of(profiles.profile(**engine | {"dtype": "float32"})).flash_attention
    assert not software_of(profiles.profile(dtype="bfloat16")).flash_attention


def test_halves_of_a_backward_are_those_that_were_measured():
    """I and W of each stage from the profile's, together longer than a backward here; the whole one beside them."""
    costs = ProfiledCosts(profiles.profile(halves=True, shares_processor=False), MODEL)
    asked = configuration(pipeline=2, schedule="zb-h1")
    found, plain = costs.costs(asked, (3, 1)), costs.costs(replace(asked, schedule="flush"), (3, 1))
    expected = [forward(place, layers, 2, 4) for place, layers in ((StagePosition.FIRST, 3), (StagePosition.LAST, 1))]
    assert found.forward == plain.forward == pytest.approx(expected)
    assert found.backward_input == pytest.approx([profiles.OF_INPUT * each for each in expected])
    assert found.backward_weight == pytest.approx([profiles.OF_WEIGHT * each for each in expected])
    assert plain.backward_input is None and plain.backward_weight is None


def test_halves_slow_each_other_down_as_whole_ones_do():
    """On a CPU, too, I and W are blended by who works beside them: between one process at work and two."""
    costs = ProfiledCosts(profiles.profile(halves=True), MODEL)
    found = costs.costs(configuration(pipeline=2, schedule="zb-h1"), (2, 2))
    for stage, place in enumerate((StagePosition.FIRST, StagePosition.LAST)):
        for values, factor in (
            (found.backward_input, profiles.OF_INPUT), (found.backward_weight, profiles.OF_WEIGHT)
        ):  # fmt: skip
            alone, beside = (factor * forward(place, 2, 2, working) for working in (1, 2))
            assert alone <= values[stage] <= beside


def test_a_profile_without_halves_prices_none():
    """Half of a backward is no price."""
    with pytest.raises(ValueError, match="zb-h1 computes backwards in halves, and the profile has no times of I and W"):
        COSTS.costs(configuration(pipeline=2, schedule="zb-h1"), (2, 2))
