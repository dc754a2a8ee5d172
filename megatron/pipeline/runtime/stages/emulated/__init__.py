"""Stages that sleep instead of computing, to measure the schedule and the runtime."""
