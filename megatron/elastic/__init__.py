"""Training whose layers freeze as they converge, on fewer and fewer pipeline ranks (PipeTransformer: He et al., 2021).

Only the cache needs torch.

    freeze_rule       the number of frozen layers, by gradients or by hand
    validation_watch  the comparison of evaluations, to notice that freezing costs too much
    stages            the stages of ranks whose first layers are frozen
    cut               the most even division of consecutive layers among ranks
    pipelines         the simulated seconds of each number of ranks and replicas
    cache/            the outputs of frozen layers, per sample, in files on the node
"""
