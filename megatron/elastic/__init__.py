"""Training that shrinks as it converges (PipeTransformer: He et al., 2021): which layers freeze, and how the others are
shared out. But for the cache it needs no torch.

    freeze_rule     how many layers are frozen, by their gradients or by hand
    cut             the layers in a row on ranks, exactly as even as it can be
    pipelines       what each number of ranks and replicas would take, simulated
    cache/          what frozen layers put out, per sample, in files on the node
"""
