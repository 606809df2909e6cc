"""Embedding tables on the servers, of which only touched rows are sent."""
