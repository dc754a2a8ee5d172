"""From the gradients of a batch to the next weights: the chain of reductions, versions, predictions, steps."""
