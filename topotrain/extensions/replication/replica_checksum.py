"""What two copies of a server compare, so that one whose memory lies does not take the other's place unnoticed.

Rule: cheap, and spread over the steps. Each bucket's values are looked at once in EVERY updates, each in another one,
and what was counted in one of them. Both copies have done the same up to an event, so both know when, and find the same
CRC there. Optimizer state is not looked at: what is wrong in it is in the values soon.
"""

from zlib import crc32

import torch

from topotrain.core.server.server import Server

EVERY = 100


def mark(server: Server, before: int) -> int | None:
    """The CRC of what is due behind the event that has brought the values' version from `before` to where it is.

    None: nothing is.
    """
    version, model = server.version, server._model
    if model is None or version <= before:
        return None
    due = {number % EVERY for number in range(max(before, version - EVERY) + 1, version + 1)}
    buckets = [bucket for bucket in model.buckets if bucket.id % EVERY in due]
    if not buckets and 0 not in due:
        return None
    clocks = [server.clocks.clock(group) for group in server.groups]
    counts = sorted(server._streams.counts().items()) if 0 in due else []
    found = crc32(repr((version, clocks, counts)).encode())
    for bucket in buckets:
        found = crc32(model.values(bucket.id).view(torch.uint8).numpy().data, found)
    return found
