"""How long a program takes, by executing its very instructions on a table of costs.

A closed formula knows one schedule. This executes any program, under the meaning that the runtime gives to its
instructions, so what it says changes when the program changes:

- a rank goes through its row in order; computations and STEPs take their time on the rank (`ranks`);
- SEND and RECV only post. A transfer starts when both ends have posted it and its channel (one per directed edge and
  kind of traffic) has taken the transfer before it; it occupies the channel for bytes / bandwidth and arrives
  `latency` later. Transfers overlap with computation, or with `Costs.overlap` False hold their sender (`channels`);
- F waits until its input has arrived, B and I until the gradient of their output has;
- EVICT, ACCEPT, RETURN and LOAD only request a move of saved activations. Each rank carries its moves out one after
  another in the background, as `program.move_order` says; one starts when both its ends have come to it, and takes
  its time on the pair (`pair_moves`). What waits for moves is said there, too;
- REDUCE_* only post, too. The reductions of a rank run one after another in the background, in the order of its row;
  one starts when all its members have reached it (`reductions`);
- STEP waits for the reductions of its version that its rank has posted;
- FETCH, FREE, STORE_GRAD and UPDATE only post, to lanes between device and host that run beside all that (`lanes`).

A program without any transfers (a compute-only one) is timed as if each tensor were sent when it is made and its
receive posted in time.

Nothing that a rank does depends on which other rank was faster, so the ranks need not be executed in the order of
time: each runs until it waits for something whose time is not known yet, and is put back on the work list by whoever
makes it known. Every instruction is executed once: the time is linear in their number, about a microsecond each.
"""

from megatron.pipeline.program.program import Program
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.simulate.ranks import Simulation
from megatron.pipeline.simulate.state import SimulationError
from megatron.pipeline.simulate.timeline import Span, Timeline

__all__ = ["Costs", "SimulationError", "Span", "Timeline", "simulate"]


def simulate(program: Program, costs: Costs | None = None) -> Timeline:
    """Execute `program` on `costs` (default: the paper's, a forward takes 1 and a backward 2, everything else nothing).

    Returns:
        The timeline, from 0, with the spans of every instruction of the program.

    Raises:
        ValueError: a cost is out of range.
        SimulationError: an instruction of a kind that is not known here, ends of a channel that do not pair up, or a
            deadlock; run `check`, which says more. Times that overflow.
    """
    return Simulation(program, costs or Costs()).run()
