"""Backup workers: a step is committed without the slowest of a group."""
