"""Servers and workers that the user starts one by one, in any order."""
