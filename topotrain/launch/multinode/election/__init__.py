"""The leader of a job of several units, its election, and what its successor has to know."""
