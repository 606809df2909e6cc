"""Gradients and values in fewer bytes, with error feedback."""
