"""The recorded stream of a job's events, and the history that is made from it."""
