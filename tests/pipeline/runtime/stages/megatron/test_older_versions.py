"""The older weight versions as entries of a checkpoint: which are saved, asked for and restored."""

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.pipeline.program.weight_policies import TWO_BW, WeightPolicy
from megatron.pipeline.runtime.stages.megatron.checkpointed_versions import OlderVersions
from megatron.pipeline.runtime.update.versions import WeightVersions

THREE = WeightPolicy("three", delay=2)


class Run:
    """A chunk of two parameters whose version v is all v, after two batches; `skipped` versions are aliases."""

    def __init__(self, weights: WeightPolicy, *, skipped: tuple[int, ...] = ()) -> None:
        self.chunk = torch.nn.Linear(3, 2)
        parameters = {f"chunk.{name}": parameter for name, parameter in self.chunk.named_parameters()}
        self.versions = WeightVersions(parameters, window=weights.delay + 1)
        for parameter in parameters.values():
            parameter.data.zero_()
        for version in (1, 2):
            if version in skipped:
                self.versions.alias(version, of=version - 1)
                continue
            with self.versions.making(version):
                for parameter in parameters.values():
                    parameter.fill_(float(version))
        self.versions.show_newest()
        self.older = OlderVersions([self.chunk], self.versions, weights, 2)

    def model(self) -> dict:
        """The sharded state of the newest version, and beside it what is no tensor."""
        state = {
            name: ShardedTensor.from_rank_offsets(f"decoder.{name}", parameter.data)
            for name, parameter in self.chunk.named_parameters()
        }
        for name, parameter in self.chunk.named_parameters():
            state[name].data = parameter
        return {"model": {**state, "_extra_state": ShardedObject("decoder._extra_state", None, (1,), (0,))}}


def values(run: Run) -> dict[int, float]:
    """version -> what all its elements are."""
    found = {}
    for version in run.versions.live():
        tensors = run.versions.tensors(version)
        assert set(tensors) == {"chunk.weight", "chunk.bias"}
        (found[version],) = {value for tensor in tensors.values() for value in tensor.flatten().tolist()}
    return found


def test_each_older_version_is_an_entry():
    """Named by its age, of the parameters alone, every key prefixed, and with that version's data."""
    entries = Run(THREE).older.to_save(Run(THREE).model())
    assert entries == {"previous_version": {"model": {}}, "previous_version_2": {"model": {}}}  # another run's tensors
    run = Run(THREE)
    entries = run.older.to_save(run.model())
    assert list(entries) == ["previous_version", "previous_version_2"]
    for (name, entry), value in zip(entries.items(), (1.0, 0.0), strict=True):
        assert set(entry["model"]) == {"weight", "bias"}
        for parameter, sharded in entry["model"].items():
            assert sharded.key == f"{name}.decoder.{parameter}" and bool((sharded.data == value).all())


@pytest.mark.parametrize(
    ("skipped", "saved"), [((2,), ["previous_version_2"]), ((1,), ["previous_version"]), ((1, 2), [])]
)
def test_a_skipped_version_is_not_saved(skipped, saved):
    """It is the same weights as the one after it."""
    run = Run(THREE, skipped=skipped)
    assert list(run.older.to_save(run.model())) == saved


@pytest.mark.parametrize(
    ("weights", "held", "after"),
    [
        (THREE, ("previous_version", "previous_version_2"), {0: 0.5, 1: 1.5, 2: 2.0}),
        (THREE, ("previous_version",), {0: 1.5, 1: 1.5, 2: 2.0}),
        (THREE, ("previous_version_2",), {0: 0.5, 1: 2.0, 2: 2.0}),
        (THREE, (), {0: 2.0, 1: 2.0, 2: 2.0}),
        (TWO_BW, ("previous_version", "previous_version_2"), {1: 1.5, 2: 2.0}),
    ],
)
def test_what_a_checkpoint_lacks_is_the_version_after_it(weights, held, after):
    """Only what the policy needs and the checkpoint has is asked for; each version comes back by its age."""
    run = Run(weights)
    asked = run.older.to_load(run.model(), lambda prefix: prefix.removesuffix(".") in held)
    assert set(asked) == set(held) & {"previous_version", *(["previous_version_2"] if weights is THREE else [])}
    loaded = {
        entry: {
            part: {name: torch.full_like(sharded.data, 1.5 if entry == "previous_version" else 0.5)
                   for name, sharded in state.items()}
            for part, state in parts.items()
        }
        for entry, parts in asked.items()
    }  # fmt: skip
    run.older.restore(loaded)
    assert values(run) == after and bool((run.chunk.weight == 2.0).all())
