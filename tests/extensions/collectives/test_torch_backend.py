"""torch.distributed as an engine: a peer that leaves, one that never comes, and what is refused."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed

from topotrain.comm.store import open_store
from topotrain.comm.torch_store.c10d_store import TorchStore
from topotrain.comm.transport import TransportError
from topotrain.config.job import ConfigError, Engine
from topotrain.extensions.collectives.torch_backend import CollectiveError, TorchCollective, check_engine


def listening():
    """Where this process can be reached over TCP: addresses as the kernel writes them."""
    mine = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink() and os.path.lexists(fd)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
                found.add(words[1].split(":")[0])
    return found


def pair(directory, seconds):
    """Two members in two threads: nothing about a group is global."""
    with ThreadPoolExecutor(2) as pool:
        make = lambda rank: TorchCollective(Engine.kGloo, f"{directory}/store/pair", rank, 2, seconds)  # noqa: E731
        return list(pool.map(make, range(2)))


def test_what_two_members_add_up_and_send_each_other(tmp_path):
    before, members = listening(), pair(tmp_path, 3600.0)

    def work(rank):
        first, second, third = (torch.full((5,), float(rank + 1)) for _ in range(3))
        mine = members[rank]
        for each in reversed([mine.all_reduce(first), mine.broadcast(second, 1), mine.all_reduce(third.mul_(10))]):
            each.wait()
        return [*first.tolist(), *second.tolist(), *third.tolist()]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [[3.0] * 5 + [2.0] * 5 + [30.0] * 5] * 2
    assert listening() - before <= {"0100007F"}
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
    for each in members:
        each.close()


def test_a_peer_that_takes_no_part_is_waited_for_until_the_deadline(tmp_path):
    one, other = pair(tmp_path, 0.5)
    with pytest.raises(CollectiveError, match=r"kGloo, rank 0 of 2: broadcast from rank 1 number 1 \(4 × float32\)"):
        one.broadcast(torch.ones(4), 1).wait()
    one.close()
    other.close()


def test_a_peer_that_left_is_noticed_at_once(tmp_path):
    one, other = pair(tmp_path, 3600.0)
    other.close()
    with pytest.raises(CollectiveError, match="all_reduce number 1"):
        one.all_reduce(torch.ones(4)).wait()
    one.close()
    with pytest.raises(CollectiveError, match=r"all_reduce number 2 .* failed .*: this group is closed"):
        one.all_reduce(torch.ones(4))
    one.close()


@pytest.mark.parametrize("several_hosts", [False, True])
def test_a_peer_that_never_comes(tmp_path, several_hosts):
    path = tmp_path / "store"
    store = TorchStore(open_store(path.as_uri())) if several_hosts else str(path / "alone")
    address = "127.0.0.1" if several_hosts else ""
    with pytest.raises(CollectiveError, match=r"kGloo, rank 0 of 2: joining the group failed \(deadline 0.5 s\)"):
        TorchCollective(Engine.kGloo, store, 0, 2, timeout_s=0.5, address=address)


def test_a_store_that_others_may_enter_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(TransportError, match="must belong to this user and be closed to others"):
        TorchCollective(Engine.kGloo, str(tmp_path / "open" / "store"), 0, 1)


def test_a_group_that_cannot_be_joined(tmp_path):
    store = str(tmp_path / "store" / "x")
    with pytest.raises(CollectiveError, match="joining the group failed"):
        TorchCollective(Engine.kGloo, store, 0, 1, interface="nosuch0")
    with pytest.raises(ValueError, match="rank = 2: must be 0 to 1"):
        TorchCollective(Engine.kGloo, store, 2, 2)


def test_engines_that_are_not_here(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"cluster.engine = kNccl: needs an NVIDIA GPU and a build of"):
        check_engine(Engine.kNccl)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match=r"cluster.engine = kNccl: needs a build of torch with NCCL"):
        check_engine(Engine.kNccl)
    with pytest.raises(ConfigError, match=r"cluster.engine = kOwn: torch.distributed has kGloo and kNccl"):
        check_engine(Engine.kOwn)
    check_engine(Engine.kGloo)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@needs_cuda
def test_nccl(tmp_path):
    group = TorchCollective(Engine.kNccl, str(tmp_path / "store" / "nccl"), 0, 1)
    tensor = torch.arange(5.0, device="cuda")
    group.all_reduce(tensor).wait()
    group.broadcast(tensor, 0).wait()
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    group.close()
