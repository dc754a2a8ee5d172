"""Changes to a run during training (PipeTransformer): layers freeze, and ranks are rearranged for the other layers.

`decisions` decides when layers freeze, `arrangement_choice` chooses the next arrangement, and `change` carries it out.
`state_in_memory` holds the run's state during the change and moves it to the new stages. It uses `transfer_plan`, which
plans the transfers of parts of tensors between ranks without torch, and `exchange`, which converts a sharded state dict
to such parts and sends them in messages with checksums.
"""
