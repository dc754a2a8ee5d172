"""The results for distinct losses, found before a run begins, as text that the ranks of a job exchange.

An `Entry` has the result for one loss, and its program is packed text beside it. The entry has the hash of the text, so
a rank that takes a program from a store can check that it is the program that was proved.
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
    """A loss, with figures of the job without the lost ranks, or with the reason why the job cannot go on.

    Attributes:
        lost: the lost ranks, in their text form.
        took: the processor time of its search, in seconds.
        crowd: the number of processes that shared a processor during the search.
        refusal: why the job cannot go on; None if it can. Only then do the other attributes have values.
        seconds, undisturbed, bound, held, held_undisturbed: as in `Survivors`.
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
        """Search for the program of a loss. Return its entry and the packed program, which is empty if there is none.

        `crowd`: as in `Entry`. The other arguments are those of `without`.
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
            ValueError: `packed` is another program.
        """
        text = zlib.decompress(packed)
        if (found := hashlib.sha256(text).hexdigest()) != self.sha256:
            raise ValueError(
                f"the program for the loss of {' '.join(self.lost)} was damaged in transit: its sha256 is {found}, and "
                f"{self.sha256} was proved; restart the job from its last checkpoint"
            )
        text = text.decode()
        notes, lost, program = read_notes(text), tuple(sorted(sharing.lost)), Program.from_csv(text)
        schedule = ProgramSchedule(  # without proofs, since this text has been proved
            program=replace(program, edges=program.graph.edges),  # a text leaves out the edges of a chain
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
