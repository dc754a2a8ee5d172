"""A second opinion on programs, written without the checker: execute them on symbols and look at the weights that come
out.

The checker reasons about the text of a program. The oracle runs it, as naively as possible: ranks are generators,
channels are untagged queues, activations, gradients and weights are symbols that remember what they were made from. A
program is right if it ends, leaves nothing behind, and every weight version of every stage is the symbol that the
policy's definition (oracle_reference.py) gives, batch after batch, on a single process. The sum of gradients is a
multiset, so the order in which microbatches are added does not matter.
"""

from collections import Counter
from collections.abc import Iterator

from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import PROVISIONAL, STASH
from tests.pipeline.check.copies_oracle import Model
from tests.pipeline.check.host_oracle import HOST_WORDS, HostMachine
from tests.pipeline.check.oracle_reference import TRUE, Symbols, Wrong, predicted, reads_ties, reference, require, true

REDUCTIONS = (Kind.REDUCE_GRAD, Kind.REDUCE_EMBED, Kind.REDUCE_NORM)
PARTIAL_REDUCTIONS = (Kind.REDUCE_PARTIAL, Kind.REDUCE_PARTIAL_EMBED)


def verdict(program: Program, bounds: list[int], *, lazy: bool = False) -> str:
    """'' if the program is right and stays within `bounds` saved microbatches per stage, else what is wrong.

    `lazy`: what runs between device and host runs as late as it can, not as early.
    """
    symbols = Symbols()
    try:
        made = Machine(program, bounds, symbols, lazy=lazy).run()
    except Wrong as wrong:
        return str(wrong)
    model = Model(program)
    right = model.on_copies(reference(program, symbols, model.num_stages))
    return "" if made == right else "the weights are other ones"


class Channel:
    """Untagged: the n-th receive gets what the n-th send gave."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.num_received = 0


class Machine:
    """One process that runs all ranks in turn."""

    def __init__(self, program: Program, bounds: list[int], symbols: Symbols, *, lazy: bool = False) -> None:
        self.program, self.bounds, self.symbols, self.lazy = program, bounds, symbols, lazy
        self.model = Model(program)
        self.state: list[RankMachine] = []
        self.added: dict[tuple[int, int], Counter] = {}  # stage of the model, version -> gradients of all its copies
        self.hosts: dict[int, HostMachine] = {}  # by rank, where weights live there
        self.channels: dict[tuple[str, int, int], Channel] = {}
        ends = sorted(self.model.ranks_of(0) | self.model.ranks_of(self.model.num_stages - 1))
        self.groups = {
            Kind.REDUCE_EMBED: ends,
            Kind.REDUCE_PARTIAL_EMBED: ends,
            Kind.REDUCE_NORM: list(range(program.num_ranks)),
        }
        self.ties: dict[tuple[int, int], Counter] = {}  # end stage, version -> what it gave to the exchange
        self.chains: list[list[tuple[Kind, int]]] = [[] for _ in program.rows]  # posted
        self.done = [0] * len(program.rows)  # reductions that have completed, per rank
        self.made: dict[tuple[int, int], int] = {}
        self.cuts: dict[
            tuple[int, tuple[str, int, int]], list[int]
        ] = {}  # version, channel -> sent, received before it

    def run(self) -> dict[tuple[int, int], int]:
        self.state += [RankMachine(self, rank) for rank in range(len(self.program.rows))]
        ranks = [self.rank(rank, row) for rank, row in enumerate(self.program.rows)]
        going = list(ranks)
        while going:
            progress = self.reduce() | (not self.lazy and self.carry())
            for rank in list(going):
                try:
                    progress |= next(rank)
                except StopIteration:
                    going.remove(rank)
                    progress = True
            if not progress and not self.carry():
                raise Wrong("deadlock")
        while self.reduce() or self.carry():
            pass
        if any(lane for host in self.hosts.values() for lane in host.lanes.values()):
            raise Wrong("a lane never ends")
        if any(len(chain) != done for chain, done in zip(self.chains, self.done, strict=True)):
            raise Wrong("a reduction never completes")
        if any(len(channel.sent) != channel.num_received for channel in self.channels.values()):
            raise Wrong("a transfer never completes")
        if any(received > sent for sent, received in self.cuts.values()):
            raise Wrong("a refused step leaves a receive in flight")
        return self.made

    def carry(self) -> bool:
        """Carry out one word between a device and its host, if any can be."""
        return any(host.carry() for host in self.hosts.values())

    def reduce(self) -> bool:
        """Run every reduction that stands at the head of the chains of all its members."""
        progress = False
        for rank, chain in enumerate(self.chains):
            if self.done[rank] == len(chain):
                continue
            kind, version = chain[self.done[rank]]
            members = self.groups.get(kind) or (self.model.sharers(rank) if kind is Kind.REDUCE_GRAD else [rank])
            heads = [
                self.chains[member][self.done[member]] if self.done[member] < len(self.chains[member]) else None
                for member in members
            ]
            if any(head is None or head[0] is not kind for head in heads):
                continue
            if kind is Kind.REDUCE_EMBED and not all(self.hosts[each].has_ends(version) for each in self.hosts):
                continue
            if any(head[1] != version for head in heads):
                raise Wrong("a group reduces different versions together")
            if kind is Kind.REDUCE_GRAD:
                for stage in (stage for member in members for stage in self.state[member].stages.values()):
                    total = self.added.setdefault((self.model.stage_of[stage.stage], version), Counter())
                    total += stage.sums.get(version - 1, Counter())
            for member in members:
                self.done[member] += 1
            progress = True
        return progress

    def rank(self, rank: int, row: tuple[Instruction, ...]) -> Iterator[bool]:
        """Execute a row; yields True after an instruction, False while it waits."""
        state = self.state[rank]
        for instruction in row:
            while not state.try_to_execute(instruction):
                yield False
            yield True
        state.end()


class RankMachine:
    """The stages of a rank, and the one chain of reductions and the one optimizer that they share."""

    def __init__(self, machine: Machine, rank: int) -> None:
        self.machine, self.program, self.chain = machine, machine.program, machine.chains[rank]
        self.rank = rank
        self.stages: dict[int, StageMachine] = {}
        for stage, owner in enumerate(machine.program.rank_of_stage):
            if owner == rank:
                self.stages[stage] = StageMachine(machine, stage, self)
        self.position_of_version: dict[int, int] = {}
        self.reduced: dict[int, list[Kind]] = {}
        self.partial: dict[int, list[Kind]] = {}
        self.validated = machine.program.first_batch  # the newest version whose step is, if steps are optimistic
        self.position_of_partial = 0  # in the chain, of the last one before the next prediction; 0: none
        self.host: HostMachine | None = None
        if machine.program.residency is not None:
            self.host = machine.hosts[rank] = HostMachine(self)

    def try_to_execute(self, instruction: Instruction) -> bool:
        """False if it has to wait."""
        require(instruction.stage in self.stages, "a stage of another rank")
        if self.host is not None:
            return self.try_with_host(self.host, instruction)
        require(instruction.kind not in HOST_WORDS, "the weights live on the device")
        return self.try_alone(instruction)

    def try_with_host(self, host: HostMachine, instruction: Instruction) -> bool:
        if instruction.kind in HOST_WORDS or instruction.kind is Kind.REDUCE_GRAD:
            host.post(instruction)
            return True
        if not host.is_ready(instruction) or not self.try_alone(instruction):
            return False
        host.executed(instruction)
        return True

    def try_alone(self, instruction: Instruction) -> bool:
        """The same but for what concerns the host."""
        if instruction.kind is Kind.STEP:
            require(instruction.stage == min(self.stages), "a step of one stage alone")
            return self.step(instruction.version)
        if instruction.kind is Kind.VALIDATE:
            require(instruction.stage == min(self.stages), "a validation of one stage alone")
            return self.validate(instruction.version)
        if instruction.kind is Kind.PREDICT:
            require(instruction.stage == min(self.stages), "a prediction of one stage alone")
            return self.predict(instruction.version)
        if instruction.kind in PARTIAL_REDUCTIONS:
            require(instruction.stage == min(self.stages), "a reduction of one stage alone")
            self.reduce_partial(instruction.kind, instruction.version)
            return True
        if instruction.kind in REDUCTIONS:
            require(instruction.stage == min(self.stages), "a reduction of one stage alone")
            self.reduce(instruction.kind, instruction.version)
            return True
        return self.stages[instruction.stage].try_to_execute(instruction)

    def reduce(self, kind: Kind, version: int) -> None:
        index = version - 1 - self.program.first_batch
        require(0 <= index < len(self.program.batches), "a version that the program does not make")
        of_ends = self.host is not None and kind is Kind.REDUCE_EMBED
        for stage in self.stages.values() if not of_ends else ():
            taken = self.machine.model.num_taken(stage.stage, version - 1)
            complete = stage.sums.get(version - 1, Counter()).total() == taken
            require(complete, "a reduction of an incomplete gradient")
        self.chain.append((kind, version))
        self.position_of_version[version] = len(self.chain)
        require(
            not any(kind in kinds for later, kinds in self.reduced.items() if later > version), "a group out of order"
        )
        self.reduced.setdefault(version, []).append(kind)
        require(self.reduced[version] == self.flags()[: len(self.reduced[version])], "reductions in another order")
        require(not self.program.optimistic or self.validated >= version - 1, "the step before is not validated")
        if (self.program.weights is STASH or self.program.optimistic) and kind is Kind.REDUCE_NORM:
            weights = next(iter(self.stages.values())).weights
            require(version in weights or version < max(weights), "the report comes before the step")

    def reduce_partial(self, kind: Kind, version: int) -> None:
        require(version not in self.partial or kind not in self.partial[version], "a partial reduction twice")
        require(version not in self.reduced, "a partial reduction after the whole one")
        for stage in self.stages.values():
            if kind is Kind.REDUCE_PARTIAL:
                require(version in stage.held, "nothing is kept that could be reduced")
            elif stage.is_first or stage.is_last:
                self.machine.ties[stage.stage, version] = stage.gradients_of(version - 1)
        self.chain.append((kind, version))
        self.position_of_partial = len(self.chain)
        self.partial.setdefault(version, []).append(kind)

    def predict(self, version: int) -> bool:
        require(version not in self.reduced, "the chain has changed the gradients")
        tied = reads_ties(self.program, min(self.stages))
        is_wanted = zip(PARTIAL_REDUCTIONS, (self.program.reduce_partial, tied), strict=True)
        wanted = {kind for kind, wanted in is_wanted if wanted}
        require(set(self.partial.get(version, [])) == wanted, "a partial reduction is missing or one too many")
        if self.machine.done[self.rank] < self.position_of_partial:
            return False
        ends = (0, self.program.num_stages - 1) if tied else ()
        ties = {end: self.machine.ties[end, version] for end in ends}
        for stage in self.stages.values():
            stage.predict(version, ties)
        self.partial.setdefault(version, [])
        self.position_of_partial = 0
        return True

    def validate(self, version: int) -> bool:
        require(self.program.optimistic and version == self.validated + 1, "a validation out of order")
        require(Kind.REDUCE_NORM in self.reduced.get(version, ()), "a validation without a norm")
        if self.machine.done[self.rank] < self.position_of_version[version]:
            return False
        self.validated = version
        for (kind, source, target), channel in self.machine.channels.items():
            counts = self.machine.cuts.setdefault((version, (kind, source, target)), [0, 0])
            if source in self.stages:
                counts[0] = len(channel.sent)
            if target in self.stages:
                counts[1] = channel.num_received
        return True

    def step(self, version: int) -> bool:
        late = self.program.weights is STASH or self.program.optimistic
        needed = [kind for kind in self.flags() if kind is not Kind.REDUCE_NORM or not late]
        require(not self.program.optimistic or self.validated == version - 1, "the step before is not validated")
        require(self.reduced.get(version, []) == needed, "a step without its reductions")
        if self.machine.done[self.rank] < self.position_of_version.get(version, 0):
            return False
        for stage in self.stages.values() if self.host is None else ():
            stage.step(version)
        self.reduced.setdefault(version, [])
        return True

    def end(self) -> None:
        for stage in self.stages.values():
            stage.end()
        if self.host is not None:
            self.host.end()
        every = {
            batch + 1: self.flags()
            for batch in range(self.program.first_batch, self.program.first_batch + len(self.program.batches))
        }
        require(self.reduced == every, "a reduction is missing or there is one too many")
        require(not self.program.optimistic or self.validated == max(every), "a step is not validated")
        predicted = set(every) if self.program.weights is PROVISIONAL else set()
        require(set(self.partial) == predicted, "a prediction is missing or there is one too many")

    def flags(self) -> list[Kind]:
        program, model = self.program, self.machine.model
        first, last = model.ranks_of(0), model.ranks_of(model.num_stages - 1)
        apart = first != last or (self.host is not None and program.num_stages > 1)
        wanted = [
            program.data_parallel and self.host is None,
            program.tied_embeddings and apart and self.rank in first | last,
            program.global_norm,
        ]
        return [kind for kind, is_wanted in zip(REDUCTIONS, wanted, strict=True) if is_wanted]


class StageMachine:
    """What a stage holds, and what its instructions do to it."""

    def __init__(self, machine: Machine, stage: int, rank: RankMachine) -> None:
        self.rank = rank
        self.machine, self.stage, self.program, self.symbols = machine, stage, machine.program, machine.symbols
        self.model, self.of_model = machine.model, machine.model.stage_of[stage]
        self.is_first, self.is_last = self.of_model == 0, self.of_model == self.model.num_stages - 1
        self.weights = {
            version: self.symbols("entry", self.of_model, version) for version in self.program.entry_versions
        }
        self.true = self.program.first_batch  # the version of the true weights, where they are others
        self.held: dict[int, Counter] = {}
        if self.program.weights is PROVISIONAL:
            self.weights[true(self.true)] = self.symbols("entry", stage, TRUE)
        machine.made.update({(stage, version): value for version, value in self.weights.items()})
        self.inputs: dict[int, tuple[Channel, int]] = {}
        self.gradients: dict[int, tuple[Channel, int]] = {}
        self.saved: dict[int, tuple[int, int]] = {}  # microbatch -> version, input
        self.recomputed: set[int] = set()
        self.outputs: dict[int, int] = {}
        self.input_gradients: dict[int, int] = {}
        self.forwarded: set[int] = set()
        self.halfway: dict[int, int] = {}  # microbatch -> what its backward has found, and its W will add up
        self.sums: dict[int, Counter] = {}

    def try_to_execute(self, instruction: Instruction) -> bool:
        """False if it has to wait."""
        kind, microbatch, version = instruction.kind, instruction.microbatch, instruction.version
        if kind is Kind.FORWARD:
            return self.forward(microbatch, version)
        if kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            return self.backward(microbatch, version, whole=kind is Kind.BACKWARD)
        if kind is Kind.BACKWARD_WEIGHT:
            self.add_gradient(microbatch, version)
        if kind is Kind.HOLD:
            require(version == self.newest_predicted + 1 and version not in self.held, "it keeps what nothing reads")
            require(version not in self.rank.reduced, "the chain has changed the gradients")
            self.held[version] = self.gradients_of(version - 1)
        if kind is Kind.RECOMPUTE:
            require(microbatch in self.saved and microbatch not in self.recomputed, "recompute without forward")
            require(self.saved[microbatch][0] == version and version in self.weights, "recompute with other weights")
            self.recomputed.add(microbatch)
        elif kind is Kind.SEND_F:
            self.channel("F", self.stage, self.model.peer(instruction)).sent.append(self.take(self.outputs, microbatch))
        elif kind is Kind.SEND_B:
            to = self.model.peer(instruction)
            self.channel("B", self.stage, to).sent.append(self.take(self.input_gradients, microbatch))
        elif kind is Kind.RECV_F:
            self.receive("F", self.model.peer(instruction), self.inputs, microbatch)
        elif kind is Kind.RECV_B:
            self.receive("B", self.model.peer(instruction), self.gradients, microbatch)
        return True

    def forward(self, microbatch: int, version: int) -> bool:
        require(microbatch not in self.forwarded, "a forward twice")
        require(version in self.weights, "weights are not there")
        require(self.model.holder(self.of_model, microbatch) == self.stage, "another copy takes the microbatch")
        if self.is_first:
            value = self.symbols("data", microbatch)
        elif (maker := self.model.holder(self.of_model - 1, microbatch)) in self.rank.stages:
            value = self.rank.stages[maker].outputs.pop(microbatch, None)
            if value is None:
                return False
        else:
            value = self.tensor(self.inputs, microbatch)
            if value is None:
                return False
            del self.inputs[microbatch]
        self.forwarded.add(microbatch)
        self.saved[microbatch] = (version, value)
        require(len(self.saved) <= self.machine.bounds[self.stage], "too many microbatches are saved")
        self.outputs[microbatch] = self.symbols("F", microbatch, self.weights[version], value)
        return True

    def backward(self, microbatch: int, version: int, *, whole: bool) -> bool:
        """Of inputs, and if it is whole of weights."""
        require(microbatch in self.saved, "a backward without forward")
        require(microbatch not in self.halfway, "a backward twice")
        recomputes = self.program.recompute and self.stage not in self.program.not_recomputed
        position = (microbatch - self.program.first_microbatch) % self.program.batches[0]
        recomputes &= (self.stage, position) not in self.program.kept
        require((microbatch in self.recomputed) == recomputes, "nothing recomputed")
        require(version in self.weights, "weights are not there")
        is_free = not self.program.optimistic or self.rank.validated >= self.program.batch_of(microbatch)
        require(is_free, "the gradients of the batch before may be needed again")
        if self.is_last:
            gradient = self.symbols("loss", microbatch, self.take(self.outputs, microbatch))
        elif (maker := self.model.holder(self.of_model + 1, microbatch)) in self.rank.stages:
            gradient = self.rank.stages[maker].input_gradients.pop(microbatch, None)
            if gradient is None:
                return False
        else:
            gradient = self.tensor(self.gradients, microbatch)
            if gradient is None:
                return False
            del self.gradients[microbatch]
        value = self.saved[microbatch][1]
        self.halfway[microbatch] = self.symbols("B", microbatch, self.weights[version], value, gradient)
        if not self.is_first:
            self.input_gradients[microbatch] = self.halfway[microbatch]
        if whole:
            self.add_gradient(microbatch, version)
        return True

    def add_gradient(self, microbatch: int, version: int) -> None:
        require(microbatch in self.halfway, "a gradient of weights without that of the input")
        used, _ = self.saved.pop(microbatch)
        require(version == used, "a gradient of weights that its forward did not use")
        batch = self.program.batch_of(microbatch)
        reduced = batch + 1 in self.rank.position_of_version or batch + 1 in self.rank.reduced
        require(not reduced or self.rank.host is not None, "a gradient comes after its reduction")
        self.sums.setdefault(batch, Counter())[self.halfway.pop(microbatch)] += 1

    def gradients_of(self, batch: int) -> Counter:
        """What the buffer has of it: of a microbatch between I and W a part, such as the gradients of biases."""
        parts = [
            self.symbols("I", value) for each, value in self.halfway.items() if self.program.batch_of(each) == batch
        ]
        return Counter(self.sums.get(batch, Counter())) + Counter(parts)

    @property
    def newest_predicted(self) -> int:
        return max(self.weights)

    def predict(self, version: int, ties: dict[int, Counter]) -> None:
        require(version == self.newest_predicted + 1, "a prediction out of order")
        require(self.true == version - 1, "a prediction from other weights")
        read = self.held.pop(version, None)
        require(read is not None or not self.program.reduce_partial, "what is reduced is not kept")
        read = self.gradients_of(version - 1) if read is None else read
        self.weights[version] = predicted(self.symbols, self.weights[true(self.true)], read, ties, self.program)
        self.machine.made[self.stage, version] = self.weights[version]
        self.weights.pop(version - 2, None)

    def step_truly(self, version: int) -> None:
        """Where computations use predictions, there is one set of true weights, which the step replaces."""
        require(version == self.true + 1 and version - 1 in self.sums, "a step out of order")
        start = self.weights.pop(true(self.true))
        self.true = version
        made = self.symbols("step", start, self.symbols.gradient_sum(self.sums[version - 1]))
        self.weights[true(version)] = self.machine.made[self.stage, true(version)] = made

    def step(self, version: int) -> None:
        if self.program.weights is PROVISIONAL:
            return self.step_truly(version)
        newest = max(self.weights)
        require(version == newest + 1, "a step out of order")
        own = self.sums.get(version - 1, Counter())
        gradients = self.machine.added.get((self.of_model, version), own) if self.program.copies else own
        self.weights[version] = self.symbols("step", self.weights[newest], self.symbols.gradient_sum(gradients))
        self.machine.made[self.stage, version] = self.weights[version]
        keep = {
            "flush": {version},
            "2bw": {version, version - 1},
            "3bw": {version, version - 1, version - 2},
            "4bw": {version, version - 1, version - 2, version - 3},
            "stash": {version},
        }[self.program.weights.name]
        if self.program.weights is STASH:
            keep |= {used for used, _ in self.saved.values()}
            require(len(keep) <= self.program.num_stages - self.stage, "too many versions are stashed")
        for old in set(self.weights) - keep:
            del self.weights[old]

    def end(self) -> None:
        require(not (self.saved or self.inputs or self.gradients or self.input_gradients), "something is left behind")
        require(not self.outputs and not self.held, "an output or a kept gradient is left behind")

    def channel(self, kind: str, source: int, target: int) -> Channel:
        return self.machine.channels.setdefault((kind, source, target), Channel())

    def receive(self, kind: str, source: int, posted: dict[int, tuple[Channel, int]], microbatch: int) -> None:
        require(microbatch not in posted, "a receive twice")
        channel = self.channel(kind, source, self.stage)
        posted[microbatch] = (channel, channel.num_received)
        channel.num_received += 1

    def tensor(self, posted: dict[int, tuple[Channel, int]], microbatch: int) -> int | None:
        require(microbatch in posted, "a tensor is needed before its receive is posted")
        channel, nth = posted[microbatch]
        return channel.sent[nth] if nth < len(channel.sent) else None

    def take(self, values: dict[int, int], microbatch: int) -> int:
        require(microbatch in values, "it sends what it does not have")
        return values.pop(microbatch)
