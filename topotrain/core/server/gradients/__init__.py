"""Sources of the gradient of a step: how the parts of a worker group become one gradient on a shard."""
