"""A model's forward as a graph."""
