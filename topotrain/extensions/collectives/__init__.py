"""All-reduce instead of push and pull: ring, tree, and torch.distributed."""
