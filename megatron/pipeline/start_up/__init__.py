"""Decisions before a job's process group forms: the rank of each process, and the support for late weights."""
