"""The size of a slice: the most bytes of a bucket.

A bucket is the unit of every message.
"""

from topotrain.config.topology import Topology

SENT_BYTES, SLOW_BYTES, FAST_BYTES = 1 << 20, 1 << 18, 1 << 22
"""Maximum bytes of a bucket: sent over a link, over a slow one, and over a fast one or in shared memory of a host.

A bucket is complete only when the last worker's part has arrived, and before the first complete bucket no result can
come back. On a slow link, where a megabyte takes a tenth of a second, that wait decides the speed. On a fast one the
calls of Python for each bucket do.
"""
SLOW_MBIT, FAST_MBIT = 500.0, 4000.0
"""Links up to this speed are slow, and links from this speed on are fast."""


def slice_bytes(topology: Topology) -> int:
    """Return the maximum bytes of a bucket."""
    cluster = topology.cluster
    if cluster.slice_bytes:
        return cluster.slice_bytes
    # Large in shared memory: a link needs many pieces to overlap them, a processor few calls.
    if all(topology.sees_memory(group) for group in range(topology.worker_groups)):
        return FAST_BYTES
    if cluster.link is not None:
        stated = cluster.link.bandwidth
        return SLOW_BYTES if stated is not None and stated <= SLOW_MBIT else SENT_BYTES
    mbit = topology.link_mbit if topology.fits_slices else 0.0
    if not mbit or SLOW_MBIT < mbit < FAST_MBIT:
        return SENT_BYTES
    return SLOW_BYTES if mbit <= SLOW_MBIT else FAST_BYTES


def sizes_in_words(topology: Topology) -> str:
    """Return the sizes of slices of a job that has not measured its links yet."""
    size = slice_bytes(topology)
    if topology.cluster.slice_bytes:
        return f"at most {size:,} bytes, as slice_bytes says"
    if not topology.fits_slices:
        return f"at most {_words(size)}"
    choices = ", ".join(map(_words, (SLOW_BYTES, SENT_BYTES))) + f" or {_words(FAST_BYTES)}"
    measured = f"at most {choices}, by the speed of the link, which is measured when the units meet"
    if not all(topology.sees_memory(group) for group in range(topology.worker_groups)):
        return measured
    shared = f"at most {_words(size)} in shared memory"
    return shared if len(topology.units) < 2 else f"{shared}; between hosts {measured}"


def _words(nbytes: int) -> str:
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} kB"
