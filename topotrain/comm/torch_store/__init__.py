"""The stores of topotrain as stores of torch.distributed."""
