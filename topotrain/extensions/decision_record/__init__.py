"""The order of decisions of a job, recorded and replayed.

Servers and workers record their decisions. A replay makes the same decisions again.
"""
