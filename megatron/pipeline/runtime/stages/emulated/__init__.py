"""Stages that sleep instead of computing: they measure the schedule and the runtime."""
