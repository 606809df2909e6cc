"""Values over the workers of a job: means, sums, broadcasts, and the first buffers."""
