"""The kinds of stages with their weight updates: any ``nn.Module``, chunks of megatron.core, and stages that sleep."""
