"""Recordings of the order of decisions.

The package has their file, the replay of a job, and comparisons.
"""
