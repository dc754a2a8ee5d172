"""The schedules that a search offers follow from the tables, at the time when it is asked."""

from megatron.pipeline.schedules import PRESETS, Preset
from megatron.planner.search import Space, offered
from megatron.planner.search.space import fewest_ranks, name_of, offer, preset_of
from tests.planner import made_up

KNOWN = (
    "gpipe", "flush", "2bw", "pipedream", "interleaved", "bpipe", "zb-h1", "zb-h2", "interleaved-zb", "zbv", "v-half",
    "v-min", "2bw+balance", "interleaved+balance", "l2l",
)  # fmt: skip


def test_presets_come_first_and_then_what_can_be_balanced_besides():
    assert tuple(offered()) == KNOWN
    assert preset_of("2bw+balance") == ("2bw", True) and preset_of("bpipe") == ("bpipe", False)
    assert offer("2bw+balance") == Preset("1f1b", "2bw", balance=True) and offer("bpipe") == PRESETS["bpipe"]
    assert name_of(Preset("1f1b", "flush", balance=True)) == "bpipe"
    assert name_of(Preset("1f1b", "stash", balance=True)) == "1f1b with stash"


def test_what_is_registered_is_offered_from_then_on():
    with made_up.registered():
        assert {"2bw-pairs", "v-gpipe", "triple", "triple+balance", "2bw-pairs+balance"} <= set(offered())
        assert not {"v-gpipe+balance", "gpipe+balance", "flush+balance", "pipedream+balance"} & set(offered())
        assert "triple" in Space(num_gpus=4, gpus_per_node=4, global_batch_size=4).schedules
    assert tuple(offered()) == KNOWN
    assert "triple" not in Space(num_gpus=4, gpus_per_node=4, global_batch_size=4).schedules


def test_ranks_from_which_on_something_moves():
    """1F1B: 4, since of 3 stages the pair saves 3 and 1, two each. Two stages on each rank: 3. Halves of backwards
    move nowhere."""
    found = {name: fewest_ranks(preset) for name, preset in offered().items()}
    assert found == dict(zip(KNOWN, (None, 4, 4, None, 3, 4, *[None] * 6, 4, 3, None), strict=True))


def test_weights_on_the_host_come_last():
    """As they are, and not balanced; a space has them where it is asked to."""
    hosted = {name for name, preset in PRESETS.items() if preset.residency is not None}
    assert hosted == {"l2l"}
    assert [name for name in offered() if preset_of(name)[0] in hosted] == ["l2l"]
    assert not hosted & set(Space(num_gpus=4, gpus_per_node=4, global_batch_size=4).schedules)
