"""Servers and workers that are started one by one, in any order."""
