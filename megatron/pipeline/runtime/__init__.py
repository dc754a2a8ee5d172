"""The runtime: executes pipeline programs on real ranks.

`engine.PipelineEngine` drives batches. `executor.Executor` executes the rows of a program, and `steps.Steps` their
reductions, steps and predictions. The folders:

- contract: the interfaces of stages and updates, their tensors, traces of a run, and how ranks meet at a store; all
  other folders use them;
- transport: tensors between ranks, and the threads on which reductions and moves run beside the computation;
- activations: the tensors that a stage saves between forward and backward: their sizes, and their moves to another rank
  or the host and back;
- update: from the gradients of a batch to the next weights: weight versions, predictions and steps;
- relay: weights that live on the host (L2L);
- stages: the kinds of stages with their weight updates: any ``nn.Module``, chunks of megatron.core, stages that sleep;
- failure: a rank that fails names itself, its instruction and its stage, and every rank of the job ends in seconds; or
  the survivors agree on the ranks that continue.

**Failures.** Problem: the ranks of a job wait for each other. A rank that raises or dies leaves the others in a
transfer or a collective until a timeout of many minutes. They then print the consequence, not the cause. And a mistake
of the user, found by every rank, is printed once per rank, each time with a traceback.

Solution: ranks agree on every failure, with the means available at that point of the job.

- Before the run (`agreement.agree_to_start`): there is a store but no process group. Every rank reports its problem, if
  any. Then all continue, or all stop with the same sentence.
- At fixed points of a run (`agreement.agreed`, `agreement.on_rank_zero`, `agreement.Agreement`): every rank tells a
  gloo group whether it has failed. If one has, all raise.
- At any other point (`failure_guard`, over `failure_board`): the first rank that fails writes its story to the store. A
  thread on every rank reads the story, prints it and ends the process.
- If the job accepts losses (`membership`): processes notice through the store that one of them is lost, and agree there
  on the ranks that continue.
- If all ranks raise an error (`agreement.guarded`), the user has to fix it, and it is printed once.

`errors` has the error classes and ends one process with a sentence. It does not import torch, since mistakes in a
command line are found before torch is imported. Exit statuses: 2 for errors that the user can fix, 1 for all others.
"""
