"""Programs: a captured graph with a placement becomes one program per worker."""
