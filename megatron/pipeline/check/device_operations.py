"""A rank's row as the actions of its host threads: operations launched on streams, and waits of the host.

Problem: a device does not execute instructions. Threads launch kernels and collectives on streams, streams wait for one
another, and if two streams share a hardware queue, a wait of one stream blocks the other. Only these operations show
whether the waits can form a circle.

Solution: each row is lowered to operations once. Rows are the same for all tensor and data ranks, so one lowering
serves all of them.

    instruction      thread   launched operations, in order
    F, R, B, I, W    main     for a needed receive: an operation on the stream of arrivals after the receive, and one on
                              compute after that; for needed moves: the host waits until their thread has launched them,
                              then an operation on compute after their end. F takes the receive first, the others take
                              the moves first. The computation is the last of these operations, or else a kernel on
                              compute; with t > 1 a collective of the tensor group on its own stream, and a kernel on
                              compute after it
    SEND, RECV       main     a transfer on the link's own stream, after the last earlier operation on compute
    REDUCE_*         chain    an operation on the chain's stream, after the last operation that compute had when the
                              reduction was posted; then a collective on the group's stream, for which the chain's
                              stream waits
      REDUCE_GRAD             over the replicas (d > 1); REDUCE_PARTIAL likewise
      REDUCE_EMBED            over the ranks of the two stages that share it; REDUCE_PARTIAL_EMBED likewise, but first
                              over the replicas if a prediction reads their mean (d > 1)
      REDUCE_NORM             over the tensor group (t > 1: sequence parallelism); the host waits to read the rank's
                              norm; over the whole job (more than one rank); the host waits to read the result
    STEP             main     the host waits until the chain has returned from its calls for the version; then a kernel
                              on compute after the chain's last operation for the version; with the distributed
                              optimizer and d > 1 an all-gather on its own stream, and a kernel on compute after it
    VALIDATE         main     as STEP, after the late chain's calls
    PREDICT          main     as STEP, after the chain's earlier calls for its version; with t > 1 also a collective of
                              the tensor group, which stands for up to three in a row (sums of two kinds, norms); with
                              shards of a mean, a collective of their group for the norm. If weights are predicted, the
                              all-gather belongs to PREDICT instead of STEP
    HOLD             main     a kernel on compute
    EVICT, ...       moves    an operation on the stream of the moves, after the operation that the move must not
                              overtake; the two hosts meet; then the transfer on a stream of its own, for which the
                              stream of the moves waits
      EVICT                   must not overtake the operations that compute had at the request
      LOAD, ACCEPT            must not overtake the last backward before the request that reads from a buffer
      RETURN                  may overtake compute

A reduction that comes after its STEP has a thread and a stream of its own, the late chain. The model leaves out:

- `--2bw-single-gradient-buffer`, which adds waits of the main host;
- a buffer that a backward returns while an earlier requested move still waits for its turn: the move may take that
  buffer, and then comes after that backward (a test proves the presets with these waits, too);
- warm-ups: each group is used once before the first batch, by one thread, in one order on all ranks, and the host waits
  for the end, so that no operation stays in a queue;
- kernels that compete for multiprocessors.
"""

from dataclasses import dataclass, field

from megatron.pipeline.check.compact import (
    AWAITS,
    CODE_OF_KIND,
    FIRST_MOVE,
    FIRST_TRANSFER,
    FIRST_UPDATE,
    KIND_OF_CODE,
    RECV_F,
    SEND_F,
    STEP,
    B,
    CompactProgram,
    F,
    I,
    Transfer,
)
from megatron.pipeline.program.instruction import EVICTIONS, LOADS, OWN_UPDATES, Members

NONE = -1

# Threads of a rank.
MAIN, CHAIN, LATE_CHAIN, MOVES = range(4)
THREADS = ("main", "chain", "late chain", "moves")

# Actions of a thread. The argument is an operation, a count, a thread, or the key of a meeting of two hosts.
LAUNCH, HOST_WAIT, BEGIN, END, POST, AWAIT, MEET = range(7)

# The members of a collective besides the rank itself; the counter in its key is separate for each set of members.
SAME_PLACE, TENSOR, DATA, JOB = range(4)


@dataclass
class RankOperations:
    """The actions of the threads of one pipeline rank. Operations are numbered in the order of their lowering.

    Attributes:
        stream_names: the names of the streams that the rank uses.
        stream, before: per operation, its stream, and the previous operation on that stream (NONE for the first).
        after: per operation, the operation of another stream whose end it awaits (NONE if there is none).
        joint: per operation, its collective as (members, key, number of pipeline ranks); None for a kernel.
        position: per operation, the position of its instruction in the row.
        steps: per thread, its actions as pairs of an action and its argument.
    """

    stream_names: list[str] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    joint: list[tuple | None] = field(default_factory=list)
    position: list[int] = field(default_factory=list)
    steps: tuple[list[tuple], ...] = field(default_factory=lambda: tuple([] for _ in THREADS))

    @property
    def num_streams(self) -> int:
        return len(self.stream_names)


def lower(compact: CompactProgram, rank: int, *, tensor: int, data: int, distributed_optimizer: bool) -> RankOperations:
    """Lower the row of a pipeline rank to operations of its threads.

    Args:
        compact: a program that is proved.
        rank: the pipeline rank.
        tensor, data: the degrees, Megatron's t and d.
        distributed_optimizer: whether a STEP gathers the parameters over the replicas.
    """
    return _Lowering(compact, rank, tensor, data, distributed_optimizer).lower()


class _Lowering:
    """The lowering of one row."""

    def __init__(self, compact: CompactProgram, rank: int, tensor: int, data: int, distributed_optimizer: bool) -> None:
        self.compact, self.rank = compact, rank
        self.tensor, self.data = tensor, data
        self._maker = CODE_OF_KIND[compact.program.weights.maker]
        self.gathers = distributed_optimizer and data > 1
        self.num_ranks = len(compact.codes)
        self._pair = f"moves {sorted((rank, compact.partners[rank]))}" if compact.moves else ""
        self.made = RankOperations()
        self.position = 0
        self._streams: dict[str, int] = {}
        self._last: list[int] = []  # last operation of each stream
        self._num_joined: dict[tuple, int] = {}
        self._received: dict[
            tuple[int, int], list[int]
        ] = {}  # (code of a computation, place) -> the operations of its receives
        self._num_calls = [0] * len(THREADS)
        self._moved: list[int] = []  # per move, the operation that ends it
        self._loaded: set[int] = set()  # places whose backward reads from a buffer
        self._read = NONE  # last operation of the latest such backward
        self._chain_of_version: dict[int, tuple[int, int, int]] = {}  # version -> (thread, its calls, last operation)
        self._stepped = NONE

    def lower(self) -> RankOperations:
        compact, rank = self.compact, self.rank
        for self.position, (code, place, version) in compact.row(rank):
            if code < FIRST_TRANSFER:
                self._compute(code, place)
            elif code < FIRST_MOVE:
                self._transfer(code, place, compact.transfers[compact.slots[rank][self.position]])
            elif code < FIRST_UPDATE:
                self._move(code, place)
            elif code in AWAITS:
                self._step(code, version)
            elif KIND_OF_CODE[code] in OWN_UPDATES:
                self._launch(MAIN, "compute")
            else:
                self._reduce(code, version)
        return self.made

    # --- actions of threads

    def _do(self, thread: int, action: int, argument: object) -> None:
        self.made.steps[thread].append((action, argument))

    def _launch(self, thread: int, stream: str, after: int = NONE, joint: tuple | None = None) -> int:
        """Launch an operation on a stream. Returns its number."""
        made, number = self.made, len(self.made.stream)
        if stream not in self._streams:
            self._streams[stream] = len(self._streams)
            made.stream_names.append(stream)
            self._last.append(NONE)
        index = self._streams[stream]
        made.stream.append(index)
        made.before.append(self._last[index])
        made.after.append(after)
        made.joint.append(joint)
        made.position.append(self.position)
        self._last[index] = number
        self._do(thread, LAUNCH, number)
        return number

    def _collective(self, thread: int, own: str, stream: str, members: int, which: str, num_ranks: int = 1) -> int:
        """Launch a collective on `stream`, after the last operation on the stream `own`, which then waits for its end.

        Returns the number of the operation on `own` that waits.
        """
        key = (which, self._count(which))
        joined = self._launch(thread, stream, self._given(own), (members, key, num_ranks))
        return self._launch(thread, own, joined)

    def _count(self, which: object) -> int:
        """The number of earlier calls with the same key."""
        self._num_joined[which] = self._num_joined.get(which, NONE) + 1
        return self._num_joined[which]

    def _given(self, stream: str) -> int:
        """The last operation launched on a stream, or NONE."""
        return self._last[self._streams[stream]] if stream in self._streams else NONE

    # --- instructions

    def _compute(self, code: int, place: int) -> None:
        waits = (self._await_tensor, self._await_moves) if code == F else (self._await_moves, self._await_tensor)
        if not any([wait(code, place) for wait in waits]):  # a list, so that each is called, in this order
            self._launch(MAIN, "compute")
        if self.tensor > 1:
            self._collective(MAIN, "compute", "tensor group", TENSOR, f"tensor {self.rank}")
        if code in (B, I) and place in self._loaded:
            self._read = self._given("compute")

    def _await_tensor(self, code: int, place: int) -> bool:
        """Let compute wait for the receives that an instruction needs. Returns whether there are any."""
        received = self._received.get((F if code == F else B, place), ()) if code in (F, B, I) else ()
        for each in received:
            self._launch(MAIN, "compute", self._launch(MAIN, "arrivals", each))
        return bool(received)

    def _await_moves(self, code: int, place: int) -> bool:
        """Let compute wait for the moves that the instruction needs. Returns whether there are any."""
        count = self.compact.awaited_moves[self.rank].get(self.position, 0)
        if count:
            self._do(MAIN, AWAIT, (MOVES, count))
            self._launch(MAIN, "compute", self._moved[count - 1])
        return count > 0

    def _transfer(self, code: int, place: int, transfer: Transfer) -> None:
        send, source, target = transfer.channel
        link = f"{'activations' if send == SEND_F else 'gradients'} {source}-{target}"
        key = (link, self._count(link))
        number = self._launch(MAIN, link, self._given("compute"), (SAME_PLACE, key, 2))
        if not transfer.is_send:
            self._received.setdefault((F if code == RECV_F else B, place), []).append(number)

    def _post(self, thread: int) -> None:
        self._num_calls[thread] += 1
        self._do(MAIN, POST, thread)
        self._do(thread, BEGIN, self._num_calls[thread])

    def _reduce(self, code: int, version: int) -> None:
        thread = LATE_CHAIN if self._stepped >= version else CHAIN
        own = THREADS[thread]
        self._post(thread)
        last = self._launch(thread, own, self._given("compute"))
        word = KIND_OF_CODE[code].row
        sums_partial = word.keeps and self.compact.program.reduce_partial
        if self.data > 1 and (word.members is Members.REPLICAS or sums_partial):
            last = self._collective(thread, own, "chain's data group", DATA, f"data {self.rank}")
        if word.members is Members.ENDS:
            last = self._collective(thread, own, "chain's embedding group", SAME_PLACE, "embedding", 2)
        elif word.members is Members.ALL:
            if self.tensor > 1:
                last = self._collective(thread, own, "chain's tensor group", TENSOR, f"chain's tensor {self.rank}")
            self._do(thread, HOST_WAIT, last)
            if self.num_ranks * self.tensor * self.data > 1:
                last = self._collective(thread, own, "chain's world group", JOB, "world", self.num_ranks)
                self._do(thread, HOST_WAIT, last)
        self._do(thread, END, None)
        self._chain_of_version[version] = thread, self._num_calls[thread], last

    def _step(self, code: int, version: int) -> None:
        if code == STEP:
            self._stepped = version
        thread, num_calls, last = self._chain_of_version.pop(version, (CHAIN, 0, NONE))
        if num_calls:
            self._do(MAIN, AWAIT, (thread, num_calls))
        self._launch(MAIN, "compute", last)
        predicts = KIND_OF_CODE[code].row.is_prediction
        if predicts and self.tensor > 1:
            self._collective(MAIN, "compute", "tensor group", TENSOR, f"tensor {self.rank}")
        if self.gathers and predicts and self.compact.program.reduce_partial:  # the norm of all shards
            self._collective(MAIN, "compute", "optimizer's data group", DATA, f"parameters {self.rank}")
        if self.gathers and code == self._maker:
            self._collective(MAIN, "compute", "optimizer's data group", DATA, f"parameters {self.rank}")

    def _move(self, code: int, place: int) -> None:
        which = self._pair
        self._post(MOVES)
        kind = KIND_OF_CODE[code]
        if kind in LOADS:
            self._loaded.add(place)
        returns = kind.row.of_pair and kind.row.saved < 0
        behind = NONE if returns else self._given("compute") if kind in EVICTIONS else self._read
        if behind != NONE:
            self._launch(MOVES, "moves", behind)
        self._do(MOVES, MEET, (which, self._num_calls[MOVES]))
        self._moved.append(self._collective(MOVES, "moves", "link of the moves", SAME_PLACE, which, 2))
        self._do(MOVES, END, None)
