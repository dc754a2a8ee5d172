"""From the gradients of a batch to the next weights: reductions, weight versions, predictions and steps."""
