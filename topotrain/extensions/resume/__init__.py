"""Resume of a script in a fresh process, where an earlier process stopped."""
