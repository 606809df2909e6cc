"""Estimates of a split before anything runs: time, bytes and memory."""
