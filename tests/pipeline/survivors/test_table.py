"""What ranks tell each other of a proved loss: all of it arrives, and nothing else is taken for it."""

import zlib

import pytest

from megatron.pipeline.schedules import Schedule
from megatron.pipeline.survivors import ReplicaRank, without
from megatron.pipeline.survivors.losses import double_losses, single_losses
from megatron.pipeline.survivors.sharing import Sharing
from megatron.pipeline.survivors.table import Entry
from tests.pipeline.survivors.jobs import schedule_of

LOST = (ReplicaRank(0, 1),)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["flush", "2bw", "zb-h1", "bpipe", "interleaved"])
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_loss_arrives_as_it_was_found(name: str, num_replicas: int):
    """The same program and numbers as those of the search; with recompute, too, and where copies make a chain."""
    schedule = schedule_of(name, 2, recompute=name == "bpipe")
    for lost in (*single_losses(2), *double_losses(2)):
        entry, packed = Entry.search(schedule, 4, num_replicas=num_replicas, lost=lost)
        entry = Entry.parse(str(entry).encode())
        assert entry.lost == tuple(map(str, lost)) and entry.took > 0
        if entry.refusal is not None:
            assert num_replicas == 2 and "every replica has lost rank" in entry.refusal and not packed
            continue
        found = entry.survivors(packed, Sharing(schedule, 4, num_replicas, frozenset(lost)))
        direct = without(schedule, 4, num_replicas=num_replicas, lost=lost)
        assert found.schedule == direct.schedule and found.schedule.repetition == direct.schedule.repetition
        assert found.schedule.proofs == direct.schedule.proofs
        assert found.schedule.name == direct.schedule.name
        assert {**vars(found), "schedule": 0} == {**vars(direct), "schedule": 0}
        assert entry.slowdown == direct.slowdown


def test_another_program_is_refused():
    """One that is as good as the proved one, but not it."""
    schedule = schedule_of("flush", 2)
    entry, packed = Entry.search(schedule, 2, num_replicas=2, lost=LOST)
    other = zlib.compress(zlib.decompress(packed).replace(b"# tied_embeddings: no\n", b"# tied_embeddings: no \n"))
    assert other != packed
    with pytest.raises(ValueError, match=r"the loss of 0\.1 was damaged in transit: its sha256 is .*; restart the job"):
        entry.survivors(other, Sharing(schedule, 2, 2, frozenset(LOST)))


def test_what_cannot_go_on_is_told_with_its_reason():
    entry, packed = Entry.search(Schedule.preset("l2l", num_stages=2), 2, num_replicas=2, lost=LOST, crowd=2.0)
    assert "keeps weights on the host" in entry.refusal and (packed, entry.crowd) == (b"", 2.0)
    assert Entry.parse(str(entry)) == entry
