"""Stages that run any ``nn.Module``, and weight updates over torch's optimizers."""
