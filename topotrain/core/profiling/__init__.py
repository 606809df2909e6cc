"""Spans: the activities of a process in a step, with their times."""
