"""What a launcher hears of a real job while it runs: memory, traffic, servers, logged values, progress."""

from dataclasses import replace
from pathlib import Path

import pytest

from topotrain.config.job import Cluster, Job, TransportChoice
from topotrain.config.topology import layout
from topotrain.core.events import Event, Finished, Logged, Resources, ServerLoad, Slices, Started, StepDone, Traffic
from topotrain.launch.local import LocalLauncher

pytestmark = pytest.mark.journey

SCRIPT = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import topotrain as tt

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 3))
data = TensorDataset(torch.randn(240, 30), torch.randint(0, 3, (240,)))
loader = DataLoader(data, batch_size=24, shuffle=True)
model, optimizer, loader = tt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
for epoch in tt.epochs(4):
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        tt.log(loss=loss, epoch=epoch)
        time.sleep(0.06)
tt.log(last=7)
"""
PARAMETERS = {"0.weight": 600, "0.bias": 20, "2.weight": 60, "2.bias": 3}
APART = Cluster(nworkers_per_group=2, nservers_per_group=2, server_worker_separate=True)


def ran(cluster: Cluster, folder: Path, served_at: str) -> list[Event]:
    (folder / "script.py").write_text(SCRIPT)
    cluster = replace(cluster, workspace=str(folder / "space"))
    job = Job(cluster=cluster, program=str(folder / "script.py"))
    events: list[Event] = []
    outcome = LocalLauncher(forkserver=served_at).start(job, layout(job.cluster), events.append)
    assert outcome.code == 0, outcome
    return events


def test_a_launcher_hears_what_each_process_uses_sends_and_does(tmp_path: Path, served_at: str) -> None:
    cluster = replace(APART, transport=TransportChoice.kTcp)
    events = ran(cluster, tmp_path, served_at)
    workers, servers = {"worker 0/0", "worker 0/1"}, {"server 0/0", "server 0/1"}

    def last(kind: type[Event]) -> dict[str, Event]:
        return {event.who: event for event in events if isinstance(event, kind)}  # type: ignore[attr-defined]

    # Each process, with its pid, read by the launcher about once a second.
    started = {event.who: event.pid for event in events if isinstance(event, Started)}
    used = [event for event in events if isinstance(event, Resources)]
    assert {event.who for event in used} >= workers and all(started[event.who] == event.pid for event in used)
    assert all(20 << 20 < event.memory_bytes < 20 << 30 for event in used)
    for who in workers:
        seconds = [event.cpu_s for event in used if event.who == who]
        assert seconds == sorted(seconds) and 0 < seconds[-1] < 60
        assert len(seconds) >= 2

    # The slices of all servers are the model, and each server has named its own once.
    named = [event for event in events if isinstance(event, Slices)]
    assert [event.who for event in named].count("server 0/0") == 1 and {event.who for event in named} == servers
    counts = dict.fromkeys(PARAMETERS, 0)
    for event in named:
        for name, count in zip(event.names, event.count, strict=True):
            counts[name] += count
    assert counts == PARAMETERS

    # 10 batches in each of 4 epochs.
    loads = last(ServerLoad)
    assert {who: event.updates for who, event in loads.items()} == dict.fromkeys(servers, 40)  # type: ignore[attr-defined]
    assert all(0 < event.busy_s < 30 for event in loads.values())  # type: ignore[attr-defined]

    # Bytes to each peer, with the sum of the totals.
    finished, sent = last(Finished), last(Traffic)
    for who in workers:
        to = sent[who].sent  # type: ignore[attr-defined]
        assert to.keys() <= servers | workers and to.keys() & servers
        if cluster.server_worker_separate:
            assert sum(to.values()) == finished[who].bytes_out and to.keys() == servers  # type: ignore[attr-defined]
    assert set(sent["server 0/1"].sent) & workers  # type: ignore[attr-defined]

    # What the script logs, the last values included.
    for who in workers:
        logged = [event for event in events if isinstance(event, Logged) and event.who == who]
        values: dict[str, float] = {}
        for event in logged:
            values |= event.values
        assert values.keys() == {"loss", "epoch", "last"} and (values["epoch"], values["last"]) == (3, 7)
        assert 3 <= len(logged) <= 41
        assert [event.step for event in logged] == sorted(event.step for event in logged)

    # Progress.
    for who in workers:
        steps = [event for event in events if isinstance(event, StepDone) and event.who == who]
        shares = [event.progress for event in steps]
        assert shares == sorted(shares) and 0 < shares[0] <= 0.5 and shares[-1] == 1.0
        assert [event.epoch for event in steps] == sorted(event.epoch for event in steps) and steps[-1].epoch == 3
        assert all(0 <= event.waited_s <= event.time + 10 for event in steps)
