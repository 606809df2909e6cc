"""The description of a job: job file, checks, cluster topology and sharding."""
