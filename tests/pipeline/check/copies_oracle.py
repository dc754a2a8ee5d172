"""Which stage of the model each stage of a program is, and who takes which microbatch: for the oracle.

Written from the text form's definition alone. Without copies each stage is a stage of the model, and takes everything.
"""

from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.program.program import Program
from tests.pipeline.check.oracle_reference import require


class Model:
    """The model behind a program.

    Attributes:
        stage_of: for each stage of the program, the stage of the model.
        num_stages: of the model.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.stage_of = [copy.stage for copy in program.copies] or list(range(program.num_stages))
        self.num_stages = max(self.stage_of) + 1

    def holder(self, stage: int, microbatch: int) -> int:
        """The stage of the program that takes a microbatch at a stage of the model."""
        if not self.program.copies:
            return stage
        start, before = self.program.first_microbatch, 0
        for size in self.program.batches:
            if microbatch < start + before + size:
                break
            before += size
        copies = [number for number, each in enumerate(self.stage_of) if each == stage]
        shares = {number: self.program.copies[number].positions for number in copies}
        place = (microbatch - start - before) % sum(map(len, shares.values()))
        return next(number for number, share in shares.items() if place in share)

    def num_taken(self, stage: int, batch: int) -> int:
        """How many microbatches of a batch a stage of the program takes."""
        return sum(self.holder(self.stage_of[stage], each) == stage for each in self.program.microbatches_of(batch))

    def peer(self, instruction: Instruction) -> int:
        """The stage of the program at the other end of a SEND or a RECV."""
        up = instruction.kind in (Kind.SEND_F, Kind.RECV_B)
        neighbour = self.stage_of[instruction.stage] + (1 if up else -1)
        everything = range(self.program.first_microbatch, self.program.first_microbatch + sum(self.program.batches))
        met = {
            self.holder(neighbour, each)
            for each in everything
            if self.holder(self.stage_of[instruction.stage], each) == instruction.stage
        } if 0 <= neighbour < self.num_stages else set()  # fmt: skip
        require(len(met) == 1 or instruction.peer in met, "a transfer to a stage that it never meets, or to no one")
        require(instruction.peer is None or instruction.peer in met, "a transfer to a stage that it never meets")
        return min(met) if instruction.peer is None else instruction.peer

    def on_copies(self, weights: dict[tuple[int, int], int]) -> dict[tuple[int, int], int]:
        """(stage of the program, version) -> weights; `weights` by the stages of the model. Copies have the same."""
        return {
            (stage, version): value
            for (own, version), value in weights.items()
            for stage, each in enumerate(self.stage_of)
            if each == own
        }

    def ranks_of(self, stage: int) -> set[int]:
        """The ranks that hold a stage of the model."""
        return {rank for rank, each in zip(self.program.rank_of_stage, self.stage_of, strict=True) if each == stage}

    def sharers(self, rank: int) -> list[int]:
        """The ranks whose gradients are added up with those of a rank; the rank alone without copies."""
        own = [stage for stage, owner in zip(self.stage_of, self.program.rank_of_stage, strict=True) if owner == rank]
        return sorted(set().union(*map(self.ranks_of, own))) if self.program.copies else [rank]
