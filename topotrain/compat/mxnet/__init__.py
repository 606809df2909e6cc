"""MXNet's KVStore."""
