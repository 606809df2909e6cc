"""Execution of a worker's program: micro-batches, transfers, dropout."""
