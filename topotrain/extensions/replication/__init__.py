"""Replication: every server has a standby in another process."""
