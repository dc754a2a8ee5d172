"""The graph of a program: which event waits for which. Check, simulation, critical path and planner all use it.

A node is the end of an event that takes time: a computation or an update of a rank, a transfer on its channel, a move
between the ranks of a pair, a reduction, or a host word, which copies to or from the host or updates there. Edges lead
to a node from everything that has to end before the event begins. The edges follow from the table of words
(`program.instruction.WORDS`), the edges between stages, the order of lanes (`program.lane_order`) and the order of
moves (`program.lane_order`). They do not depend on any time:

- A rank goes through its row in order. A word of the compute lane waits for the word before it in that lane, and for
  everything that it needs: tensors, moves, words of other lanes, the reductions of its version. All other words are
  only posted.
- A transfer waits until both of its ends are posted, and for the transfer before it on its channel. There is one
  channel for each directed edge and kind of tensor (`channels`). A forward-only stage has a bound on the SENDs whose
  receives are not yet posted (`StageGraph.most_unread`); a SEND beyond that bound waits.
- A move waits for the requests of both ranks, and for the move before it.
- A reduction waits until all of its members have posted it, and for the reduction before it in the queue of each
  member.
- A host word waits until it is posted, for the word before it in its lane, and for the words that
  `program.lane_order` names.

The actions of a rank never depend on which other rank was faster: a rank reads its channels in its own order, as a
process of a Kahn network does. So a single execution finds the graph (`execution`), and finds it in an order in which
each node stands after everything that it waits for. If that execution cannot reach its end, the rows are in a deadlock,
and `check.progress` says who waits for whom. The longest path through the graph, at any costs, is the simulation
(`megatron.pipeline.simulate`).

The graph has two forms. The full form (`row_graph`) has a node for every word of a program, transfers included. The
folded form (`megatron.planner.time.event_graph`) prices rows that have not been lowered: it counts a transfer as part
of the computation that waits for it. Both forms share `execution` with its moves and reductions.
"""
