"""How a worker runs its program: micro-batches, transfers, dropout."""
