"""The oracle's machine for weights that live on the host: slots, buffers and lanes, as naive as the rest of it.

A word is posted to its lane and carried out when it stands first there and what it needs is there. The device holds the
weights that have been fetched and not freed; the host holds one version of each stage, and gradients that have come.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.program.lane_order import most_boundaries
from tests.pipeline.check.oracle_reference import require

if TYPE_CHECKING:
    from tests.pipeline.check.oracle import RankMachine

LANE_OF_WORD = {Kind.FETCH: "down", Kind.FREE: "down", Kind.STORE_GRAD: "up", Kind.UPDATE: "optimizer",
                Kind.RELOAD: "down", Kind.OFFLOAD: "up"}  # fmt: skip
HOST_WORDS = set(LANE_OF_WORD)
STASH_WORDS = (Kind.OFFLOAD, Kind.RELOAD)
BACKWARDS = (Kind.BACKWARD,)
COMPUTATIONS = (Kind.FORWARD, Kind.RECOMPUTE, *BACKWARDS)
NUM_BUFFERS = 2


class HostMachine:
    """The machine of one rank."""

    def __init__(self, rank: RankMachine) -> None:
        self.rank, self.machine, self.program = rank, rank.machine, rank.program
        self.lanes: dict[str, deque[Instruction]] = {lane: deque() for lane in LANE_OF_WORD.values()}
        entry = self.program.first_batch
        self.weights = {stage: (entry, each.weights.pop(entry)) for stage, each in rank.stages.items()}  # on the host
        self.gradients: dict[tuple[int, int], Counter] = {}  # stage, version -> what has come to the host
        self.promised: dict[int, int] = {}  # stage -> version, fetched and not freed in the row so far
        self.used: set[int] = set()
        self.buffers: set[tuple[int, int]] = set()  # stage, batch
        self.posted: set[tuple[Kind, int, int]] = set()
        self.place_in_chain: dict[tuple[int, int], int] = {}  # of the REDUCE_GRAD of a stage, a version
        self.embedded: set[int] = set()  # versions with a REDUCE_EMBED
        self.stepped: set[int] = set()
        self.num_boundaries = 0  # tensors between stages that are on the device
        self.stashed: set[tuple[int, int]] = set()  # that have come to the host
        self.away: set[tuple[int, int]] = set()  # in the row, and not yet back
        self.back: set[tuple[int, int]] = set()  # of those asked back, that are there
        self.moved: list[tuple[Kind, int, int]] = []
        self.leaving: list[tuple[int, int]] = []  # OFFLOADs before the last computation, then those behind it
        self.num_earlier = 0
        last = self.program.num_stages - 1
        tied = self.program.tied_embeddings and last > 0
        self.ends = [stage for stage in rank.stages if tied and stage in (0, last)]

    # --- the row

    def post(self, word: Instruction) -> None:
        kind, stage, version = word.kind, word.stage, word.version
        if kind in STASH_WORDS:
            self.post_stash(kind, (stage, word.microbatch))
            self.lanes[LANE_OF_WORD[kind]].append(word)
            return
        if kind not in (Kind.FETCH, Kind.FREE):
            require((kind, stage, version) not in self.posted, "a word of an update twice")
            self.require_version(version)
            require(kind is Kind.UPDATE or self.is_complete(stage, version), "gradients are still to come")
        if kind is Kind.FETCH:
            made = version == self.program.first_batch or (Kind.UPDATE, stage, version) in self.posted
            require(made, "nobody makes the version before it is fetched")
            require(stage not in self.promised, "it is fetched twice")
            self.promised[stage] = version
        elif kind is Kind.FREE:
            require(self.promised.get(stage) == version and stage in self.used, "what is freed was not needed")
            del self.promised[stage]
            self.used.discard(stage)
        elif kind is Kind.REDUCE_GRAD:
            require(self.program.data_parallel, "there are no replicas")
            require((Kind.STORE_GRAD, stage, version) not in self.posted, "what is reduced has left")
            self.rank.chain.append((kind, version))
            self.place_in_chain[stage, version] = len(self.rank.chain)
        elif kind is Kind.STORE_GRAD:
            reduced = (stage, version) in self.place_in_chain
            require(reduced or not self.program.data_parallel, "what leaves is not reduced")
        else:
            require((Kind.STORE_GRAD, stage, version) in self.posted, "the host would update without gradients")
            require(stage not in self.ends or version in self.embedded, "the embedding lacks the other end")
            require(self.program.residency.is_eager or version in self.stepped, "nothing has decided about the update")
        self.posted.add((kind, stage, version))
        if kind in LANE_OF_WORD:
            self.lanes[LANE_OF_WORD[kind]].append(word)

    def post_stash(self, kind: Kind, item: tuple[int, int]) -> None:
        stage, microbatch = item
        machine = self.rank.stages[stage]
        require(self.program.residency.stash == "host" and stage > 0, "nothing is to leave")
        require((kind, *item) not in self.moved, "an input moves twice")
        self.moved.append((kind, *item))
        if kind is Kind.OFFLOAD:
            require(self.program.recompute and stage not in self.program.not_recomputed, "its graph refers to it")
            require(microbatch in machine.saved and microbatch not in machine.recomputed, "it is not there, or in use")
            self.away.add(item)
            self.leaving.append(item)
        else:
            require(item in self.away, "it has not left")
            self.count(+1)

    def count(self, change: int) -> None:
        self.num_boundaries += change
        most = most_boundaries(max(self.program.batches))
        require(self.program.residency.stash != "host" or self.num_boundaries <= most, "too many inputs on the device")

    def require_version(self, version: int) -> None:
        index = version - 1 - self.program.first_batch
        require(0 <= index < len(self.program.batches), "a version that the program does not make")

    def is_complete(self, stage: int, version: int) -> bool:
        added = self.rank.stages[stage].sums.get(version - 1, Counter()).total()
        return added == self.program.batches[version - 1 - self.program.first_batch]

    def is_ready(self, instruction: Instruction) -> bool:
        """Whether something else than a word of the host finds what it needs here."""
        kind, stage = instruction.kind, instruction.stage
        if kind is Kind.STEP:
            require(not self.promised, "weights stay over the end of a batch")
        if kind is Kind.REDUCE_EMBED:
            stored = ((Kind.STORE_GRAD, end, instruction.version) in self.posted for end in self.ends)
            require(all(stored), "an end of the embedding has not left")
        if kind is Kind.REDUCE_NORM:
            stored = ((Kind.STORE_GRAD, each, instruction.version) in self.posted for each in self.rank.stages)
            require(all(stored), "gradients whose norms count have not left")
        if kind not in COMPUTATIONS:
            return True
        item = (stage, instruction.microbatch)
        if kind is Kind.FORWARD and any(each not in self.stashed for each in self.leaving[: self.num_earlier]):
            return False
        if kind is not Kind.FORWARD and item in self.away:
            require((Kind.RELOAD, *item) in self.moved, "its input is on the host")
            if item not in self.back:
                return False
        require(self.promised.get(stage) == instruction.version, "its weights are not fetched")
        if instruction.version not in self.rank.stages[stage].weights:
            return False
        if kind not in BACKWARDS:
            return True
        batch = self.program.batch_of(instruction.microbatch)
        others = {its_batch for its_stage, its_batch in self.buffers if its_stage == stage and its_batch != batch}
        stored = ((Kind.STORE_GRAD, stage, other + 1) in self.posted for other in others)
        require(all(stored), "gradients of two batches are added up")
        require((Kind.STORE_GRAD, stage, batch + 1) not in self.posted, "gradients come after they have left")
        require((stage, batch + 1) not in self.place_in_chain, "gradients come after they are reduced")
        return (stage, batch) in self.buffers or len(self.buffers) < NUM_BUFFERS

    def executed(self, instruction: Instruction) -> None:
        if instruction.kind in COMPUTATIONS:
            self.used.add(instruction.stage)
            self.num_earlier = len(self.leaving)
            self.count_computation(instruction)
        if instruction.kind in BACKWARDS:
            self.buffers.add((instruction.stage, self.program.batch_of(instruction.microbatch)))
        if instruction.kind is Kind.STEP:
            self.stepped.add(instruction.version)
        if instruction.kind is Kind.REDUCE_EMBED:
            self.embedded.add(instruction.version)

    def count_computation(self, computation: Instruction) -> None:
        """What it takes and makes of tensors between stages; its input is kept until its backward."""
        kind, stage, stages = computation.kind, computation.stage, self.rank.stages
        if kind is Kind.FORWARD:
            self.count((stage + 1 in stages) - (stage - 1 in stages) + (stage > 0))
        elif kind is Kind.BACKWARD:
            self.count((stage - 1 in stages) - (stage + 1 in stages))
            self.count(-(stage > 0))

    def end(self) -> None:
        require(not self.promised, "weights stay over the end of the program")

    # --- the lanes

    def carry(self) -> bool:
        """Carry out the first word of some lane, if any can be."""
        return any(lane and self.try_word(lane[0]) and bool(lane.popleft()) for lane in self.lanes.values())

    def try_word(self, word: Instruction) -> bool:
        stage, version, machine = word.stage, word.version, self.rank.stages[word.stage]
        if word.kind is Kind.OFFLOAD:
            self.stashed.add((stage, word.microbatch))
            self.count(-1)
            return True
        if word.kind is Kind.RELOAD:
            if (stage, word.microbatch) in self.stashed:
                self.back.add((stage, word.microbatch))
            return (stage, word.microbatch) in self.back
        if word.kind is Kind.FREE:
            del machine.weights[version]
            return True
        if word.kind is Kind.FETCH:
            on_host, weights = self.weights[stage]
            require(on_host <= version, "the version has been overwritten on the host")
            if on_host < version:
                return False
            num_resident = sum(len(each.weights) for each in self.rank.stages.values())
            require(num_resident < self.program.residency.stages, "there is no room")
            machine.weights[version] = weights
            return True
        if word.kind is Kind.STORE_GRAD:
            if self.machine.done[self.rank.rank] < self.place_in_chain.get((stage, version), 0):
                return False
            self.gradients[stage, version] = Counter(machine.sums[version - 1])
            self.buffers.discard((stage, version - 1))
            return True
        if (stage, version) not in self.gradients or (stage in self.ends and not self.is_embedded(version)):
            return False
        on_host, weights = self.weights[stage]
        require(on_host == version - 1, "an update out of order")
        made = machine.symbols("step", weights, machine.symbols.gradient_sum(self.gradients[stage, version]))
        self.weights[stage] = version, made
        self.machine.made[stage, version] = made
        return True

    def is_embedded(self, version: int) -> bool:
        chain, done = self.rank.chain, self.machine.done[self.rank.rank]
        return (Kind.REDUCE_EMBED, version) in chain[:done]

    def has_ends(self, version: int) -> bool:
        """Whether the gradients of the rank's ends of an embedding have come to the host."""
        return all((end, version) in self.gradients for end in self.ends)
