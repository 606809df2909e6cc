"""What a split costs: time, bytes and memory, before anything runs."""
