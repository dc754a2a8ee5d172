"""Epochs: the processes of the job from one agreement to the next, decided by the order of a log. No torch.

Ranks that compute the same layers together (tensor and context parallelism) are a *group*: `group_size` ranks with
consecutive numbers. None of them can continue without the others. So if one rank is lost, its group is lost, and the
group comes back only as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron.pipeline.runtime.failure.heartbeats import Member


@dataclass(frozen=True)
class Epoch:
    """The processes that train together from one agreement to the next. Equal on all of them.

    Attributes:
        number: counted from 0.
        ranks: the global ranks in it, ascending.
        lost: rank -> why its process is not in this epoch, for each process that was in the epoch before.
        joined: the ranks whose processes are new.
        notes: rank -> the note that it passed to `Membership.agree`; new processes have none.
    """

    number: int
    ranks: tuple[int, ...]
    lost: Mapping[int, str]
    joined: tuple[int, ...]
    notes: Mapping[int, str]


def first_record(members: Iterable[Member]) -> dict[str, Any]:
    """Return the record of epoch 0."""
    return {"members": sorted(members), "lost": {}, "joined": [], "notes": {}}


def decided(
    members: Iterable[Member], log: Iterable[Mapping[str, Any]], *, group_size: int = 1
) -> dict[str, Any] | None:
    """Return the record of the next epoch. It depends only on the order of the log, so all readers get the same record.

    The log counts up to the line after which each of `members` has arrived or is in a group with a lost rank. A process
    that has arrived and is also found lost is lost. If all processes of the epoch admit newcomers, the epoch has all
    newcomers that any of them has heard, except those whose groups are incomplete. Returns None if the log has no such
    line.

    Args:
        members: the processes of the current epoch.
        log: lines with a `token` and a `kind`: "arrived" with a `note` and with `admits`, the newcomers that the
            process has heard, or None if it admits none; "lost" with a `reason`; "suspected" with a `reason`.
    """
    by_token = {member.token: member for member in members}
    told: dict[str, dict[str, Mapping[str, Any]]] = {"arrived": {}, "lost": {}, "suspected": {}}
    waiting = set(by_token)
    for line in log:
        if line["token"] not in by_token:
            continue
        told[line["kind"]].setdefault(line["token"], line)
        if line["kind"] == "lost":
            waiting -= lost_with(by_token.values(), {line["token"]}, group_size)
        elif line["kind"] == "arrived":
            waiting.discard(line["token"])
        if not waiting:
            return _record(by_token, group_size, **told)
    return None


def lost_with(members: Iterable[Member], lost: Collection[str], group_size: int) -> set[str]:
    """Return the tokens of all members whose group has a lost rank. `lost`: the tokens of the lost members."""
    members = tuple(members)
    groups = {member.rank // group_size for member in members if member.token in lost}
    return {member.token for member in members if member.rank // group_size in groups}


def of_whole_groups(members: Iterable[Member], group_size: int) -> tuple[Member, ...]:
    """Return the members whose groups are complete. No two of `members` have the same rank."""
    members = tuple(members)
    sizes = Counter(member.rank // group_size for member in members)
    return tuple(member for member in members if sizes[member.rank // group_size] == group_size)


def _record(
    by_token: Mapping[str, Member], group_size: int, arrived: Mapping, lost: Mapping, suspected: Mapping
) -> dict[str, Any]:
    gone = lost_with(by_token.values(), lost, group_size)
    stay = [member for token, member in by_token.items() if token not in gone]
    lines = [arrived[member.token] for member in stay]
    new = {}
    if all(line["admits"] is not None for line in lines):
        ranks = {member.rank for member in stay}
        asking = [Member(*each) for line in lines for each in line["admits"]]
        latest = {member.rank: member for member in asking if member.rank not in ranks}
        new = {member.rank: member for member in of_whole_groups(latest.values(), group_size)}
    reasons = {}
    for token in sorted(gone):
        told = "; ".join(each[token]["reason"] for each in (lost, suspected) if token in each)
        if token not in lost:
            group = by_token[token].rank // group_size
            first = min(by_token[each].rank for each in lost if by_token[each].rank // group_size == group)
            told = f"rank {first}, with which it computes its layers, is lost"
        reasons[by_token[token].rank] = told
    notes = {member.rank: arrived[member.token]["note"] for member in stay}
    return {"members": sorted([*stay, *new.values()]), "lost": reasons, "joined": sorted(new), "notes": notes}


def epoch_of(number: int, record: Mapping[str, Any]) -> tuple[Epoch, tuple[Member, ...]]:
    """Return the epoch of a record that was read from JSON, and the epoch's processes."""
    members = tuple(Member(*each) for each in record["members"])
    lost, notes = (
        MappingProxyType(
            {int(rank): text for rank, text in sorted(record[name].items(), key=lambda each: int(each[0]))}
        )
        for name in ("lost", "notes")
    )
    ranks = tuple(member.rank for member in members)
    return Epoch(number, ranks, lost, tuple(record["joined"]), notes), members
