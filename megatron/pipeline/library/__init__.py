"""The engine as a library: `megatron.pipeline.Pipeline` trains any ``nn.Module`` without this project's trainer."""
