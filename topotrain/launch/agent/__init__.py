"""A unit: the process that starts, watches and ends the processes of one place."""
