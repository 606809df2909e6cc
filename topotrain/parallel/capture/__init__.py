"""Capture of a model's forward as a graph."""
