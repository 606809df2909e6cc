"""The order of decisions of a job: recorded by its servers and workers, and made again in a replay."""
