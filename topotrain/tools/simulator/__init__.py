"""A simulator of jobs under seeded faults, in virtual time."""
