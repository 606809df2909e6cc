"""The costs of a cluster block before it runs.

They are step time, links, waits and staleness.
"""
