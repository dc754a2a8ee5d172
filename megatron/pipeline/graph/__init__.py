"""Who waits for whom: the one graph that check, simulation, critical path and planner ask.

Nodes are the ends of what takes time: a computation or an update of a rank, a transfer on its channel, a move between
the ranks of a pair, a reduction, a word of a lane to or from the host. Edges lead to a node from all that has to end
before it begins. They follow from the words' table (`program.instruction.WORDS`), the edges between stages, the order
of lanes (`program.lane_order`) and the order of moves (`program.move_order`), and depend on no time:

- a rank goes through its row in order. A word of the compute lane waits for the one before it, and for what it needs:
  tensors, moves, words of lanes, the reductions of its version. All other words only post;
- a transfer waits until both its ends are posted, and for the transfer before it on its channel (one per directed
  edge and tensor). A SEND of a forward-only stage waits until all but a few of those before it have their receives
  posted (`StageGraph.most_unread`);
- a move waits for the requests of both its ranks, and for the move before it;
- a reduction waits until all its members have posted it, and for the reduction before it in the queue of each
  (`reductions`);
- a word of a lane to or from the host waits until it is posted, for the word before it in its lane, and for what
  `program.lane_order` names.

Nothing that a rank does depends on which other rank was faster: it reads its channels in its own order, like a process
of a Kahn network. So one execution finds the graph (`execution`), in an order in which all that a node waits for stands
before it. Where that execution comes to no end, the rows are in a deadlock, and `deadlock` says who waits for whom. The
longest path through the graph, on any costs, is the simulation (`megatron.pipeline.simulate`).

There are two forms. The full one (`row_graph`) has every word of a program, transfers included. The folded one
(`megatron.planner.time.event_graph`) prices rows that have not been lowered: a transfer belongs to the computation that
waits for it. Both share `execution` with its moves and reductions.
"""
