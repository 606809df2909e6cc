"""Emulated links with bandwidth, delay, jitter and loss, for measurements."""
