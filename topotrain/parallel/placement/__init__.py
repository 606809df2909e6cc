"""Placement: which worker computes which part of a model."""
