"""Copies of the parameters that have drifted away from the servers' values."""
