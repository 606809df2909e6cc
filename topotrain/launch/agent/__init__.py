"""A unit: the process that starts, watches and ends some of the processes of a job."""
