"""How tensors get from rank to rank, and the lanes on which that happens beside the computation."""
