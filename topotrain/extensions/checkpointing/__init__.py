"""Snapshots of a running job: taken behind one step, written to disk, read back."""
