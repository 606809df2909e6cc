"""Figures of a running job for Prometheus, TensorBoard, files and trackers.

All exports read one history of the job's events, and each has a thread of its own in the launcher. None of them can
delay the job or another export: an export that is too slow finds fewer points.
"""
