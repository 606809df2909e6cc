"""Bounds of a message, and the error for bytes that break them.

A program that only frames bytes (a store, the command line) reads them without torch.
"""

# The most that a peer can make a process read as one message.
MAX_META = 64 * 1024
MAX_BODY = 64 * 1024 * 1024


class ProtocolError(Exception):
    """A peer sent bytes that are not a message, or a message that is not allowed now."""
