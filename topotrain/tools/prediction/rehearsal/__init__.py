"""A job in virtual time, each process for itself, with the costs of a probe."""
