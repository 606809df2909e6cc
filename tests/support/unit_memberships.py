"""The membership of one unit in a job of several: with a store, and without processes."""

from topotrain.comm.store import Store, within
from topotrain.comm.store.discovery.job_registry import JobRecord, Registry
from topotrain.launch.multinode.control_connection import ControlAccess
from topotrain.launch.multinode.node_info import HostMap, NodeInfo, NodeVerifier
from topotrain.launch.multinode.node_membership import StoreKeys, UnitContext
from topotrain.launch.multinode.unit_membership import UnitMembership

SECRET = bytes(32)
RUN = "jobs/j.1"


def introduced(rank: int, word: str, name: str = "", count: int = 3, secret: bytes = SECRET) -> NodeInfo:
    """What a unit says of itself."""
    proof = NodeVerifier(secret, "j", count).proof(rank)
    return NodeInfo(rank, name or f"h{rank}", 1, "m", "", proof, count, False, word)


def host_map(count: int = 3) -> HostMap:
    """Units on as many hosts."""
    units = tuple(introduced(rank, f"{rank:08x}", count=count) for rank in range(count))
    names = tuple(unit.name for unit in units)
    return HostMap(tuple(range(count)), names, ("127.0.0.1",) * count, units=units)


def membership(store: Store, rank: int, hosts: HostMap, recovers: bool = True, saves: bool = False) -> UnitMembership:
    """Unit 0 leads; `saves`: the unit has the first server, which takes snapshots."""
    run = within(store, RUN)
    stores = StoreKeys(run, within(store, "jobs/j"), Registry(store), JobRecord("j", "j"))
    access, verifier = ControlAccess(run, "j.1", SECRET), NodeVerifier(SECRET, "j", len(hosts.units))
    context = UnitContext(stores, rank, hosts.units[rank].word, access, verifier, recovers, saves)
    return UnitMembership(context, hosts, rank == 0)
