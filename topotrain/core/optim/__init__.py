"""Optimizers as servers run them: the adapter over torch.optim, learning rates, optimizer state as plain data."""
