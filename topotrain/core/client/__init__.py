"""A worker's client of the parameter servers: push, commit, wait for values."""
