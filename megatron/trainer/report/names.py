"""What the numbers of a batch are called, in reports and in files."""

LOSS = "lm loss"
"""The loss that every language model has; BERT's sentence order adds "sop loss"."""
CLASS_LOSS = "loss"
"""The loss of a model that tells classes; it adds "accuracy"."""
SAVED_ACTIVATIONS = "saved_activation_bytes"
ALLOCATED = "peak_allocated_bytes"
