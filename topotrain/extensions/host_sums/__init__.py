"""Sums of the workers of a host, which travel to servers of other hosts once."""
