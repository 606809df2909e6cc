"""Units on several hosts: rendezvous, membership, and common decisions."""
