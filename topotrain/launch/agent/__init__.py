"""A unit: the process that starts, watches and ends a part of a job's processes."""
