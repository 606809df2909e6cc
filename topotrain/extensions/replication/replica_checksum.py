"""Checksums by which a primary and its standby are compared.

A server with a memory fault must not replace the other copy unnoticed. The check is spread over the steps: in EVERY
updates, the values of each bucket are summed once, each bucket at another update, and the counters at one of them. Both
copies have handled the same events, so both compute the CRC of the same state.
"""

from zlib import crc32

import torch

from topotrain.core.server.server import Server

EVERY = 100


def mark(server: Server, before: int) -> int | None:
    """Return the CRC that is due after an event, or None if none is due.

    The event has raised the version of the values from `before` to the present version.
    """
    version, model = server.state.version, server.model
    if model is None or version <= before:
        return None
    # One event may apply several updates. More than EVERY of them make every bucket due once.
    due = {number % EVERY for number in range(max(before, version - EVERY) + 1, version + 1)}
    buckets = [bucket for bucket in model.buckets if bucket.id % EVERY in due]
    if not buckets and 0 not in due:
        return None
    clocks = [server.worker_groups.clocks.clock(group) for group in server.groups]
    counts = sorted(server.steps.batches.counts().items()) if 0 in due else []
    found = crc32(repr((version, clocks, counts)).encode())
    for bucket in buckets:
        # Optimizer state is left out, because errors in it soon appear in the values.
        found = crc32(model.values(bucket.id).view(torch.uint8).numpy().data, found)
    return found
