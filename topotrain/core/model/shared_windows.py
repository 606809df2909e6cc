"""Shared memory of the processes on one host: buffers, and rules for writing.

A *window* is a part of a process's flat buffer that another process maps. There are two kinds:

- Parameters: one buffer for each worker group, or for several groups that share their values. The parameters of all its
  workers are views of it (in a split model, each in the spaces that it holds). Servers write it only while all workers
  of the group wait in `step()` or for a fetch.
- Gradients: each worker's buffer "grad", where its script sees means. The servers write a group's mean into it before
  the end of the backward. At `step()` they read it, with the changes of the script.

The first server of a group distributes the parameter buffers. All processes compute here which buffers exist.
"""

import torch

from topotrain.config.sharding import SliceMap
from topotrain.config.topology import Topology
from topotrain.core.model.schema import BufferMemory, torch_dtype
from topotrain.core.protocol import ProtocolError, SharedBuffer

VALUES = "values"

Flats = dict[tuple[str, int], torch.Tensor]  # (name, space) -> 1-D


def buffer_of(topology: Topology, group: int) -> str:
    """Return the name of a group's parameter buffer; VALUES is the servers' own copy."""
    cluster = topology.cluster
    alone = len(topology.worker_groups_of(topology.server_group_of(group))) == 1 and not topology.synced
    # The parameters of a single group are the servers' own values, so that updates need no copy. With n_fetch > 1 a
    # worker changes its parameters by itself between fetches.
    if alone and cluster.n_push == cluster.n_fetch == 1:
        return VALUES
    first = topology.workers(group)[0]
    for members in topology.sharing(topology.unit_of(first)):
        if first in members:
            return f"params {members[0].group}"
    return f"params {group}"


def buffers_of(topology: Topology, server_group: int) -> dict[int, str]:
    """Return the parameter buffers by worker group, for groups on the servers' host."""
    groups = topology.worker_groups_of(server_group)
    return {group: buffer_of(topology, group) for group in groups if topology.sees_memory(group)}


def make(slice_map: SliceMap, topology: Topology, server_group: int, memory: BufferMemory) -> Flats:
    """Allocate the parameter buffers of a server group for all elements of all spaces."""
    names = sorted(set(buffers_of(topology, server_group).values()))
    spaces = [space for space in slice_map.spaces if space.length]
    return {(name, s.index): memory.allocate(s.length, torch_dtype(s.dtype)) for name in names for s in spaces}


def part(flats: Flats, slice_map: SliceMap, shard: int) -> Flats:
    """Return the range of a shard in buffers over the whole."""
    found: Flats = {}
    for (name, space), flat in flats.items():
        lo, hi = slice_map.ranges[space][shard]
        if hi > lo:  # a shard may have no elements of a small space
            found[name, space] = flat[lo:hi]
    return found


def seen(message: SharedBuffer, slice_map: SliceMap, shard: int | None) -> torch.Tensor:
    """Return a received window as elements: the range of a shard, or the whole space.

    Raises:
        ProtocolError: the space does not exist, or the size is wrong.
    """
    if message.body is None or not 0 <= message.space < len(slice_map.spaces):
        raise ProtocolError(f"a window on space {message.space} of {len(slice_map.spaces)}")
    space = slice_map.spaces[message.space]
    lo, hi = (0, space.length) if shard is None else slice_map.ranges[space.index][shard]
    # A wrong size would make two processes write the same memory as different elements.
    if message.body.nbytes != (hi - lo) * space.itemsize:
        raise ProtocolError(f"a window of {message.body.nbytes} bytes, expected {(hi - lo) * space.itemsize}")
    return message.body.view(torch_dtype(space.dtype))


def expected(topology: Topology, slice_map: SliceMap, server_group: int, shard: int) -> set[tuple[str, int]]:
    """Return the parts of parameter buffers that a server must receive."""
    names = set(buffers_of(topology, server_group).values())
    ranges = [(space.index, slice_map.ranges[space.index][shard]) for space in slice_map.spaces]
    return {(name, space) for name in names for space, (lo, hi) in ranges if hi > lo}
