"""What servers and workers agree on about a model: its schema and the memory it lies in."""
