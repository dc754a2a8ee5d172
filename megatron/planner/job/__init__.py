"""Inputs and results of planning: the configuration, the cluster and its devices, the software, and the estimate."""
