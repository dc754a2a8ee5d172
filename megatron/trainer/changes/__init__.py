"""What a run changes while it trains (PipeTransformer): frozen layers, and the arrangement of its ranks for the others.

`decisions` says when layers freeze, `arrangement_choice` which arrangement follows, and `change` makes the change.
`state_in_memory` holds the run's state meanwhile and hands it to the new stages. Below it, `transfer_plan` (parts of
tensors, and which rank sends which part to which) imports no torch, and `exchange` (a sharded state dict as such parts,
sent in messages with checksums) does.
"""
