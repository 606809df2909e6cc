"""Sums of the workers of one host, which travel to the servers of other hosts once."""
