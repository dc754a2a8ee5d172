"""Transport of tensors between ranks, and the background lanes on which it runs beside the computation."""
