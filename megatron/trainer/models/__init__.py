"""The models, built from megatron.core, with weights that do not depend on the number of stages."""
