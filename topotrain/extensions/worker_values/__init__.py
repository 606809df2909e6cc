"""Values over a job's workers: means, sums, broadcasts, and the first buffers."""
