"""In-place recovery: the survivors of a worker's death repeat one step and go on."""
