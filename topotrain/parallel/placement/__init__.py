"""Which worker computes which part of a model."""
