"""Training whose layers freeze as they converge, on fewer and fewer pipeline ranks (PipeTransformer: He et al., 2021).

Only the cache needs torch.

    freezing          the number of frozen layers, by gradients or by hand, and when freezing costs too much
    stages            the division of layers among ranks, and the stages of ranks whose first layers are frozen
    pipelines         the simulated seconds of each number of ranks and replicas
    cache/            the outputs of frozen layers, per sample, in files on the node
"""
