"""Servers with a second copy in another process."""
