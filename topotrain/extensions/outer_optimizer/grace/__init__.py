"""Grace windows: rounds with a quorum that stay open for more workers."""
