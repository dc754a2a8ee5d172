"""Failures: a rank that fails names itself, its instruction and its stage, and every rank of the job ends in seconds.

Problem: the ranks of a job wait for each other. A rank that raises or dies leaves the others in a transfer or a
collective until a timeout of many minutes, and what they then print is the consequence, not the cause. And a mistake of
the user's, found by every rank, is printed once per rank, with as many tracebacks.

Solution: ranks agree on every failure, at each point of a job by what they have there.

- Before the run (`agreement.agree_to_start`): there is a store and no process group. Every rank tells what it refuses,
  and all go on, or all stop with the same sentence.
- At fixed points of a run (`agreement.agreed`, `agreement.on_rank_zero`, `agreement.Agreement`): every rank tells a
  gloo group whether it has failed, and all raise.
- At any other point (`failure_guard`, over `failure_board`): the first rank that fails tells its story to the store,
  and a thread on every rank reads the story, prints it and ends the process.
- Where all ranks raise the same error (`agreement.guarded`), it is the user's to mend, and is printed once.

`errors` has the errors themselves and how one process ends with a sentence, without torch: mistakes in a command line
are found before torch is imported. Exit statuses: 2 for what the user can mend, 1 for all else.
"""
