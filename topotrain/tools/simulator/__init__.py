"""A job under faults that a seed chooses, in virtual time."""
