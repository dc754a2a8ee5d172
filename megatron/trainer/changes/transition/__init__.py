"""A run changes its degrees while its ranks stay: `memory` holds the state meanwhile and hands it over to the new cut,
`parallel_groups` keeps the process groups of before until the new ones hold.

Below `memory`: `boxes` (parts of tensors) and `plan` (who sends what to whom) know no torch; `pieces` (a sharded state
dict as such parts) and `exchange` (messages with checksums) do.
"""
