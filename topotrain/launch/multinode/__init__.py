"""Units on several hosts: how they meet and act together."""
