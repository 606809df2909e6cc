"""Graphs as plain data, for a client that drives a cluster from outside."""
