"""Figures of a running job for Prometheus, TensorBoard, files and trackers.

Each export has a thread of its own in the launcher, and gets its figures from a history of the job's events. None of
them can delay the job: events wait in a bounded queue, and are dropped where an export is too slow.
"""
