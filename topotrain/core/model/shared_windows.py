"""Memory that the residents of one host share: which buffers, whose they are, and who may write when.

A *window* is a part of a resident's flat buffer that another resident sees in its own address space. Two kinds:

* parameters: one buffer for each worker group (several, where groups share their values), which all its workers live
  in, where a model is split each in the spaces that it holds, and its servers write. It is written only while all
  workers of the group wait in `step()` or for a fetch. Where a single group uses a server group, that buffer is the
  servers' own copy of the values: an update then appears in the workers' parameters without any copy.
* gradients: each worker's buffer "grad", into which the servers write a group's mean while the worker waits at the end
  of its backward, and from which they read at `step()` what the script made of it.

The first server of a group gives the parameter buffers out; all processes compute here which there are.
"""

import torch

from topotrain.config.sharding import SliceMap
from topotrain.config.topology import Topology
from topotrain.core.model.schema import Allocate, torch_dtype
from topotrain.core.protocol import ProtocolError, SharedBuffer

VALUES = "values"

Flats = dict[tuple[str, int], torch.Tensor]  # (name, space) -> 1-D


def buffer_of(topology: Topology, group: int) -> str:
    """The name of the parameter buffer that a group's workers live in; VALUES is the servers' own copy."""
    cluster = topology.cluster
    alone = len(topology.worker_groups_of(topology.server_group_of(group))) == 1 and not topology.synced
    if alone and cluster.n_push == cluster.n_fetch == 1:
        return VALUES
    first = topology.workers(group)[0]
    for members in topology.sharing(topology.unit_of(first)):
        if first in members:
            return f"params {members[0].group}"
    return f"params {group}"


def buffers_of(topology: Topology, server_group: int) -> dict[int, str]:
    """Worker group -> parameter buffer, of the groups of a server group that see its memory."""
    groups = topology.worker_groups_of(server_group)
    return {group: buffer_of(topology, group) for group in groups if topology.sees_memory(group)}


def make(slice_map: SliceMap, topology: Topology, server_group: int, allocate: Allocate) -> Flats:
    """The parameter buffers of a server group, each over the whole of every space."""
    names = sorted(set(buffers_of(topology, server_group).values()))
    spaces = [space for space in slice_map.spaces if space.length]
    return {(name, s.index): allocate(s.length, torch_dtype(s.dtype)) for name in names for s in spaces}


def part(flats: Flats, slice_map: SliceMap, shard: int) -> Flats:
    """The range of a shard in buffers over the whole; a shard may have none of a space."""
    found: Flats = {}
    for (name, space), flat in flats.items():
        lo, hi = slice_map.ranges[space][shard]
        if hi > lo:
            found[name, space] = flat[lo:hi]
    return found


def seen(message: SharedBuffer, slice_map: SliceMap, shard: int | None) -> torch.Tensor:
    """A window as elements: the range of a shard, or the whole of the space. Raises ProtocolError."""
    if message.body is None or not 0 <= message.space < len(slice_map.spaces):
        raise ProtocolError(f"a window on space {message.space} of {len(slice_map.spaces)}")
    space = slice_map.spaces[message.space]
    lo, hi = (0, space.length) if shard is None else slice_map.ranges[space.index][shard]
    if message.body.nbytes != (hi - lo) * space.itemsize:
        raise ProtocolError(f"a window of {message.body.nbytes} bytes, expected {(hi - lo) * space.itemsize}")
    return message.body.view(torch_dtype(space.dtype))


def expected(topology: Topology, slice_map: SliceMap, server_group: int, shard: int) -> set[tuple[str, int]]:
    """The parts of parameter buffers that a server is to be given."""
    names = set(buffers_of(topology, server_group).values())
    ranges = [(space.index, slice_map.ranges[space.index][shard]) for space in slice_map.spaces]
    return {(name, space) for name in names for space, (lo, hi) in ranges if hi > lo}
