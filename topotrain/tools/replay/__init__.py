"""Recordings of the order of decisions: their file, the replay of a job, and comparisons."""
