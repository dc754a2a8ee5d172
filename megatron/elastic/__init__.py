"""Training whose layers freeze as they converge, on fewer and fewer pipeline ranks (PipeTransformer: He et al., 2021).
But for the cache it needs no torch.

    freeze_rule       how many layers are frozen, by their gradients or by hand
    validation_watch  whether evaluations say that freezing has cost too much
    stages            the stages of ranks whose first layers are frozen
    cut               layers in a row, shared out to ranks as evenly as can be
    pipelines         the simulated seconds of each number of ranks and replicas
    cache/            what frozen layers put out, per sample, in files on the node
"""
