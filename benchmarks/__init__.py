"""What topotrain's speed is, beside its peers': one module per table, each of them a command of its own."""
