"""Before what imports megatron.core."""

from megatron import backend

backend.install()
