"""What every worker of a pool needs, imported once: the server from which workers are forked loads this module."""

from megatron import backend

backend.install()

import megatron.training.pretraining  # noqa: F401 - with it torch and all of megatron.core that a case uses
