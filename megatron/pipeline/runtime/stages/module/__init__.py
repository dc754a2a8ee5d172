"""Any ``nn.Module`` as a stage, and torch's optimizers as its update."""
