"""What was found for distinct losses before a run begins, as text that the ranks of a job tell each other.

An `Entry` is what a loss comes to, and its program is packed text beside it. The entry has the hash of the text, so a
rank that takes a program from a store knows that it has the one that was proved.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from megatron.pipeline.program.csv_text import read_notes
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules.continuation import Repetition
from megatron.pipeline.schedules.pipeline_schedule import PipelineSchedule
from megatron.pipeline.schedules.program_schedule import ProgramSchedule
from megatron.pipeline.survivors import ReplicaRank, Survivors, name_of, without
from megatron.pipeline.survivors.sharing import Sharing


@dataclass(frozen=True)
class Entry:
    """A loss, and the job without the lost ranks; or the reason why it cannot go on.

    Attributes:
        lost: the lost ranks, in their text form.
        took: the processor time of its search, in seconds.
        crowd: how many processes shared a processor where it was searched.
        refusal: why the job cannot go on; None if it can. Then the others are those of `Survivors`.
        sha256: the hash of the program.
    """

    lost: tuple[str, ...]
    took: float
    crowd: float = 1.0
    refusal: str | None = None
    seconds: float = 0.0
    undisturbed: float = 1.0
    bound: float = 0.0
    held: tuple[int, ...] = ()
    held_undisturbed: tuple[int, ...] = ()
    sha256: str = ""

    @classmethod
    def search(
        cls, schedule: PipelineSchedule, num_microbatches: int, *, num_replicas: int, lost: Sequence[ReplicaRank],
        crowd: float = 1.0,
    ) -> tuple[Entry, bytes]:  # fmt: skip
        """Return what a loss comes to, and its packed program, which is empty where there is none.

        The other arguments are those of `without`.
        """
        began, names = time.thread_time(), tuple(map(str, lost))
        try:
            found = without(schedule, num_microbatches, num_replicas=num_replicas, lost=lost)
        except ValueError as error:
            return cls(names, time.thread_time() - began, crowd, str(error)), b""
        entry = cls(
            names, time.thread_time() - began, crowd, None, found.seconds, found.undisturbed, found.bound, found.held,
            found.held_undisturbed, found.schedule.sha256,
        )  # fmt: skip
        return entry, zlib.compress(found.schedule.text.encode())

    @property
    def slowdown(self) -> float:
        """The time of a batch over that of the undisturbed job."""
        return self.seconds / self.undisturbed

    def survivors(self, packed: bytes, sharing: Sharing) -> Survivors:
        """Return the job without the lost ranks.

        Args:
            packed: the program that `search` has returned beside this entry.
            sharing: the ranks that are left.

        Raises:
            ValueError: it is another program.
        """
        text = zlib.decompress(packed)
        if (found := hashlib.sha256(text).hexdigest()) != self.sha256:
            raise ValueError(
                f"the program for the loss of {' '.join(self.lost)} has changed on its way: its sha256 is {found}, and "
                f"{self.sha256} was proved; restart the job from its last checkpoint"
            )
        text = text.decode()
        notes, lost, program = read_notes(text), tuple(sorted(sharing.lost)), Program.from_csv(text)
        schedule = ProgramSchedule(  # without its proofs, which were made of this text
            program=replace(program, edges=program.graph.edges),  # a text need not say that they make a chain
            repetition=Repetition(notes["fill"], notes["period"]),
            name=name_of(sharing.schedule.name_of_weights, lost, sharing.num_replicas),
        )
        return Survivors(
            schedule, sharing.ranks, lost, self.seconds, self.undisturbed, self.bound, self.held, self.held_undisturbed
        )

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str | bytes) -> Entry:
        """Read the text form."""
        read = json.loads(text)
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in read.items()})
