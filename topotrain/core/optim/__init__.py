"""Optimizers on servers: the torch.optim adapter, learning rates, optimizer state."""
