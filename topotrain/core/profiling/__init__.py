"""Spans: what a process did in a step, and when."""
