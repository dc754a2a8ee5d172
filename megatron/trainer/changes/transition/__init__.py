"""A run changes its degrees while its ranks stay: `memory` holds the state meanwhile and hands it over to the new cut,
`parallel_groups` keeps the process groups of before until the new ones hold.

Below `memory`: `plan` (parts of tensors, and who sends what to whom) knows no torch; `exchange` (a sharded state dict
as such parts, and messages with checksums) does.
"""
