"""A rank's row as what its host threads do: operations launched on streams, and waits of the hosts.

Problem: a device does not execute instructions. Threads launch kernels and collectives on streams, streams wait for one
another, and where two streams share a hardware queue, a wait of the one holds up the other. Whether that can end in a
circle is seen only in these operations.

Solution: each row is lowered once. Rows are the same for all tensor and data ranks, so one lowering serves them all.

    instruction      thread   what it launches
    F, R, B, I, W    main     where it needs a receive, an operation on the stream of arrivals after it, and one on
                              compute after that; where it needs moves, the host waits until their thread has launched
                              them, and then an operation on compute after their end. F needs its receive first, the
                              others their moves. The computation is the last of these, or a kernel on compute; with
                              t > 1 a collective of the tensor group on its own stream, and a kernel on compute after it
    SEND, RECV       main     a transfer on the link's own stream, after what compute was given before
    REDUCE_*         chain    on the chain's stream, after what compute was given before it was posted; then on its
                              group's stream a collective, for which the chain's stream waits
      REDUCE_GRAD             over the replicas (d > 1); REDUCE_PARTIAL alike
      REDUCE_EMBED            over the ranks of the first and the last stage; REDUCE_PARTIAL_EMBED alike,
                              and before over the replicas where their mean is read (d > 1)
      REDUCE_NORM             over the tensor group (t > 1: sequence parallelism); the host reads the rank's norm, so it
                              waits; over the whole job (more than one rank); the host reads the result, so it waits
    STEP             main     the host waits until the chain has returned from its calls of the version; then a kernel
                              on compute, after the chain's last operation for it; with the distributed optimizer and
                              d > 1 an all-gather on its own stream, and a kernel on compute after it
    PREDICT          main     as STEP, after the chain's calls of its version so far; with t > 1 a collective of the
                              tensor group first, which stands for up to three in a row (sums of two kinds, norms); with
                              shards of a mean one of their group, for the norm. It gathers, and STEP does not, where
                              the weights are predicted
    HOLD             main     a kernel on compute
    EVICT, ...       moves    on the stream of the moves, after what it may not run ahead of; both hosts meet; then the
                              transfer on a stream of its own, for which the stream of the moves waits
      EVICT                   not ahead of what compute was given before the request
      LOAD, ACCEPT            not ahead of the last backward that has read from a buffer, given before the request
      RETURN                  may run ahead of compute

A reduction that stands after its STEP has a thread and a stream of its own, the late chain's. What is not modelled:

- `--2bw-single-gradient-buffer`, which adds waits of the main host;
- a buffer that a backward gives back while a move that was requested before it still waits for its turn: the move may
  take that buffer, and then comes after that backward (a test proves the presets with these waits, too);
- warm-ups: each group is used once before the first batch, by one thread, in one order on all ranks, and the host waits
  for the end. They leave nothing in a queue;
- the kernels that fill one another's multiprocessors.
"""

from dataclasses import dataclass, field

from megatron.pipeline.check.compact import (
    AWAITS,
    CODE_OF_KIND,
    EVICT,
    FIRST_MOVE,
    FIRST_TRANSFER,
    FIRST_UPDATE,
    KIND_OF_CODE,
    LOAD,
    RECV_F,
    RETURN,
    SEND_F,
    STEP,
    B,
    CompactProgram,
    F,
    I,
    Transfer,
)
from megatron.pipeline.program.instruction import Members

NONE = -1

# Threads of a rank.
MAIN, CHAIN, LATE_CHAIN, MOVES = range(4)
THREADS = ("main", "chain", "late chain", "moves")

# What a thread does next. The argument is an operation, a count, a thread, or what two hosts meet for.
LAUNCH, HOST_WAIT, BEGIN, END, POST, AWAIT, MEET = range(7)

# Who takes part in a collective, beside the rank itself; what else its key has is counted over these ranks alone.
SAME_PLACE, TENSOR, DATA, JOB = range(4)


@dataclass
class RankOperations:
    """What the threads of one pipeline rank do. Operations are numbered in the order in which they are lowered.

    Attributes:
        stream_names: the streams that the rank uses.
        stream, before: per operation its stream, and the one before it on that stream (NONE: it is the first).
        after: per operation the one of another stream whose end it waits for (NONE: it waits for none).
        joint: per operation the collective that it is a part of, as (who takes part, which, how many pipeline ranks);
            None for a kernel.
        position: per operation, where its instruction stands in the row.
        steps: per thread, what it does: pairs of an action and its argument.
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
    """Lower a rank's row.

    Args:
        compact: a program that is proved.
        rank: of the pipeline.
        tensor, data: degrees, Megatron's t and d.
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
        self._last: list[int] = []  # per stream, its last operation
        self._num_joined: dict[tuple, int] = {}
        self._received: dict[
            tuple[int, int], list[int]
        ] = {}  # what a computation needs -> the operations that bring it
        self._num_calls = [0] * len(THREADS)
        self._moved: list[int] = []  # per move, the operation that ends it
        self._loaded: set[int] = set()  # places whose backward reads from a buffer
        self._read = NONE  # what such a backward ends with
        self._chain_of_version: dict[int, tuple[int, int]] = {}  # its number of calls, and its last operation
        self._stepped = NONE

    def lower(self) -> RankOperations:
        compact, rank = self.compact, self.rank
        rows = zip(compact.codes[rank], compact.places[rank], compact.versions[rank], strict=True)
        for self.position, (code, place, version) in enumerate(rows):
            if code < FIRST_TRANSFER:
                self._compute(code, place)
            elif code < FIRST_MOVE:
                self._transfer(code, place, compact.transfers[compact.slots[rank][self.position]])
            elif code < FIRST_UPDATE:
                self._move(code, place)
            elif code in AWAITS:
                self._step(code, version)
            else:
                self._reduce(code, version)
        return self.made

    # --- what a thread does

    def _do(self, thread: int, action: int, argument: object) -> None:
        self.made.steps[thread].append((action, argument))

    def _launch(self, thread: int, stream: str, after: int = NONE, joint: tuple | None = None) -> int:
        """Launch an operation; returns its number."""
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
        """A collective after what `own` was given, and what is given to `own` next waits for it."""
        key = (which, self._count(which))
        joined = self._launch(thread, stream, self._given(own), (members, key, num_ranks))
        return self._launch(thread, own, joined)

    def _count(self, which: object) -> int:
        """How many of these there were before."""
        self._num_joined[which] = self._num_joined.get(which, NONE) + 1
        return self._num_joined[which]

    def _given(self, stream: str) -> int:
        """The last operation that a stream was given."""
        return self._last[self._streams[stream]] if stream in self._streams else NONE

    # --- instructions

    def _compute(self, code: int, place: int) -> None:
        waits = (self._await_tensor, self._await_moves) if code == F else (self._await_moves, self._await_tensor)
        if not any([wait(code, place) for wait in waits]):  # all of them, in this order
            self._launch(MAIN, "compute")
        if self.tensor > 1:
            self._collective(MAIN, "compute", "tensor group", TENSOR, f"tensor {self.rank}")
        if code in (B, I) and place in self._loaded:
            self._read = self._given("compute")

    def _await_tensor(self, code: int, place: int) -> bool:
        """Whether compute waits for a receive."""
        received = self._received.get((F if code == F else B, place), ()) if code in (F, B, I) else ()
        for each in received:
            self._launch(MAIN, "compute", self._launch(MAIN, "arrivals", each))
        return bool(received)

    def _await_moves(self, code: int, place: int) -> bool:
        """Whether compute waits for moves."""
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
        if thread == CHAIN:
            self._chain_of_version[version] = self._num_calls[CHAIN], last

    def _step(self, code: int, version: int) -> None:
        if code == STEP:
            self._stepped = version
        num_calls, last = self._chain_of_version.pop(version, (0, NONE))
        if num_calls:
            self._do(MAIN, AWAIT, (CHAIN, num_calls))
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
        if code == LOAD:
            self._loaded.add(place)
        behind = NONE if code == RETURN else self._given("compute") if code == EVICT else self._read
        if behind != NONE:
            self._launch(MOVES, "moves", behind)
        self._do(MOVES, MEET, (which, self._num_calls[MOVES]))
        self._moved.append(self._collective(MOVES, "moves", "link of the moves", SAME_PLACE, which, 2))
        self._do(MOVES, END, None)
