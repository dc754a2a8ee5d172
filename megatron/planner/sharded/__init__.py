"""Weights, gradients and optimizer state split over replicas (FSDP, ZeRO-2 and ZeRO-3): memory and time without a
pipeline. Other systems train so; this project's trainer does not."""
