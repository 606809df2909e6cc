"""The gradient of a step, from the parts of a worker group."""
