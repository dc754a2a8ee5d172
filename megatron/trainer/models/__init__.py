"""The models, in megatron.core's words, with weights that do not depend on how many stages hold them."""
