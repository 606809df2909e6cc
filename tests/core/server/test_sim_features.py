"""Promises of a job beyond the plain step, on the simulated network: warm-up, clear failures, the end, no spinning."""

import ast
from pathlib import Path

import pytest
import torch
from faulty_network import NetworkFaults
from seeds import seeds
from simulation import STORM, VIEWS, ScriptedCluster, ScriptedWorker, job, same, total, trace
from torch import nn
from torch.utils.data import DataLoader

import topotrain
from topotrain.config.job import Agreement, Reduce
from topotrain.config.topology import Address, Role
from topotrain.core.client.client import PeerLost
from topotrain.core.protocol import Push
from topotrain.tools.simulator.sim_network import Deadlock
from topotrain.training.final_parameters import fetch_final
from topotrain.training.worker import Worker

pytestmark = pytest.mark.simulated


# --- warm-up -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server_groups", "agreement", "bound"),
    [(1, None, None), (1, None, 0), *zip([2] * 4, Agreement, [None, 0, 0, None], strict=True)],
)
def test_group_0_warms_up_alone_and_all_start_from_its_values(server_groups, agreement, bound):
    warmup = 3
    for seed in seeds(15):
        more = {"agreement": agreement} if agreement else {}
        made = job(2, 1, 2, nserver_groups=server_groups, warmup_steps=warmup, max_staleness=bound, **more)
        cluster, started = ScriptedCluster(made, seed, STORM), {}
        pushes = trace(cluster, Push)
        first: list[list[torch.Tensor]] = []

        def script(scripted: ScriptedWorker, started=started, first=first, cluster=cluster) -> None:
            scripted.open(9.0)
            started[scripted.me.group] = scripted.values(), scripted.cluster.sim.now
            if scripted.me.group == 1:
                home = cluster.server(cluster.topology.server_group_of(1), 0)
                clocks = home.worker_groups.clocks
                assert clocks.clock(1) == warmup and clocks.live(), "it starts at the common clock, and live"
            for step in range(warmup + 2):
                scripted.sleep(0.0, 0.01)
                gradient = scripted.numbers()
                if scripted.me.group == 0 and step < warmup:
                    first.append(gradient)
                scripted.step(gradient)
            scripted.finish()

        cluster.play(script)
        warm = [9.0 - part for part in total(first)]
        if server_groups > 1 or bound == 0:
            assert same(started[1][0], warm), f"seed {seed}: group 1 did not start from group 0's values"
        early = [who for time, who, _, _ in pushes if time < started[1][1]]
        assert {who.group for who in early} == {0}, "nobody else trains during the warm-up"
        assert {message.step for _, who, _, message in pushes if who.group == 0} >= set(range(warmup + 2))
        for sim_server in cluster.sim_servers.values():
            clocks = sim_server.server.worker_groups.clocks
            # group 0's warm-up counts as warm-up, the others take its clock
            assert [clocks.clock(g) for g in sim_server.server.groups] == [
                warmup + 2 if g == 0 else 2 * warmup + 2 for g in sim_server.server.groups
            ]


def test_a_group_0_that_ends_during_the_warm_up_lets_the_others_start():
    for server_groups in (1, 2):
        for seed in seeds(8):
            of, pushed = job(2, 1, 2, nserver_groups=server_groups, warmup_steps=5), []
            cluster = ScriptedCluster(of, seed, STORM)

            def script(scripted: ScriptedWorker, pushed=pushed) -> None:
                scripted.open(9.0)
                for _ in range(2 if scripted.me.group == 0 else 4):
                    pushed.append(scripted.numbers())
                    scripted.step(pushed[-1])
                scripted.finish()
                if scripted.me == scripted.cluster.workers[0]:
                    scripted.client.values.fetch_final()
                    pushed.append([part - 9.0 for part in scripted.values()])

            cluster.play(script)
            assert len(pushed) == 7 and same(total(pushed), [part * 0 for part in pushed[0]]), f"seed {seed}"


# --- clear failures ----------------------------------------------------------------------------------------------


def test_a_last_backward_without_a_step_is_no_error():
    for seed in seeds(20):
        cluster = ScriptedCluster(job(2, 2, 2), seed, STORM)

        def script(scripted: ScriptedWorker) -> None:
            scripted.open()
            scripted.step(scripted.numbers())
            scripted.sleep(0.0, 0.02)
            scripted.backward(scripted.numbers())
            scripted.sleep(0.0, 0.02)
            scripted.finish()

        cluster.play(script)
        assert cluster.server(0, 0).state.version == 2


# --- the real worker ---------------------------------------------------------------------------------------------


def train(cluster: ScriptedCluster, worker: Worker, model: nn.Module, loader, pause: float = 0.01) -> None:
    for x, y in loader:
        cluster.sim.sleep(cluster.random.uniform(0.0, pause))
        worker.optimizers[0].zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        worker.optimizers[0].step()


def digits_of(
    cluster: ScriptedCluster, scripted: ScriptedWorker, optimizer: str = "SGD"
) -> tuple[Worker, nn.Module, DataLoader]:
    """The same small problem on every worker."""
    torch.manual_seed(11)
    x = torch.randn(24, 5)
    data = torch.utils.data.TensorDataset(x, x @ torch.randn(5, 2))
    model = nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.BatchNorm1d(40), nn.Linear(40, 2))
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.05)
    rng = torch.Generator().manual_seed(3)  # torch's own are shared by all actors: real workers are processes
    return cluster.worker(scripted.me, model, made), model, DataLoader(data, 6, shuffle=True, generator=rng)


def finals(seed: int, weather: NetworkFaults, optimizer: str = "Adam") -> list[torch.Tensor]:
    cluster, found = ScriptedCluster(job(1, 3, 2, reduce=Reduce.kMean), seed, weather), {}

    def script(scripted: ScriptedWorker) -> None:
        worker, model, plain = digits_of(cluster, scripted, optimizer)
        loader = cluster.loader(worker, plain, "broadcast")
        for _ in range(2):
            train(cluster, worker, model, loader)
        state = worker.optimizers[0].state_dict()["state"]
        assert all(set(entry) == {"step", "exp_avg", "exp_avg_sq"} for entry in state.values())
        found[scripted.me.index] = [state[index]["exp_avg"].clone() for index in sorted(state)]
        worker.finish()
        if scripted.me == cluster.workers[0]:
            fetch_final(worker)
            found[3] = [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]

    cluster.play(script)
    return [tensor for who in sorted(found) for tensor in found[who]]


def test_a_synchronous_job_has_the_same_bits_in_any_weather():
    """Model, buffers, optimizer state and the broadcast draws, while every message may come late or twice."""
    calm = finals(0, NetworkFaults())
    assert len(calm) == 3 * 6 + 9
    for seed, weather in ((1, STORM), (2, STORM), (3, VIEWS), (4, NetworkFaults(duplicate=1.0, reorder=0.5))):
        assert same(finals(seed, weather), calm), f"seed {seed}"


def test_buffers_are_averaged_over_the_groups_at_the_drain():
    cluster, means = ScriptedCluster(job(3, 1, 1, reduce=Reduce.kMean), 0, STORM), {}

    def script(scripted: ScriptedWorker) -> None:
        worker, model, plain = digits_of(cluster, scripted)
        train(cluster, worker, model, cluster.loader(worker, plain, "static"))
        means[scripted.me.group] = model[2].running_mean.clone()
        worker.finish()
        if scripted.me == cluster.workers[0]:
            fetch_final(worker)
            means["final"] = model[2].running_mean.clone()

    cluster.play(script)
    assert torch.allclose(means["final"], (means[0] + means[1] + means[2]) / 3, atol=1e-6)
    assert not torch.equal(means[0], means[1])


@pytest.mark.parametrize(
    ("of", "size", "steps", "version"),
    [
        # Two groups of one unit whose parameters are the same memory.
        (job(2, 1, 1, nworkers_per_procs=2), 8, 5, None),
        # Three full pushes of each worker, and what was left.
        (job(2, 1, 2, n_push=2, n_fetch=3), 200, 7, 2 * 4),
    ],
    ids=["hogwild in memory", "own steps"],
)
def test_real_workers_lose_no_update(of, size, steps, version):
    """Integers, so every lost update shows."""
    for seed in seeds(10):
        cluster, pushed = ScriptedCluster(of, seed, STORM), []
        shared = {0: torch.zeros(64)} if cluster.topology.sharing(0) else {}

        def script(scripted: ScriptedWorker, cluster=cluster, pushed=pushed, shared=shared) -> None:
            model = nn.Linear(size, 1, bias=False)
            nn.init.constant_(model.weight, 4.0)
            worker = cluster.worker(scripted.me, model, torch.optim.SGD(model.parameters(), lr=1.0), shared)
            for step in range(steps):
                cluster.sim.sleep(cluster.random.uniform(0.0, 0.02))
                worker.optimizers[0].zero_grad()
                pushed.append(torch.arange(float(size)) + step + 10 * scripted.me.group)
                model(pushed[-1]).backward()
                worker.optimizers[0].step()
            worker.finish()
            if scripted.me == cluster.workers[0]:
                fetch_final(worker)
                assert torch.equal(model.weight[0], 4.0 - torch.stack(pushed).sum(0)), f"seed {cluster.sim.seed}"

        cluster.play(script)
        assert len(pushed) == 2 * steps and cluster.server(0, 0).state.version == (version or 2 * steps)


# --- nobody spins ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "error", "words"),
    [
        (True, PeerLost, "lost server 0/1"),
        (False, Deadlock, "these wait: worker 0/0, worker 0/1, worker 1/0, worker 1/1"),
    ],
)
def test_defect_12_a_worker_is_told_that_a_server_died_or_waits_and_does_nothing_at_all(told, error, words):
    """No timer, no retry, no spinning: with the network silent nothing happens any more, and the run says who waits."""
    cluster = ScriptedCluster(job(2, 2, 2), 0, STORM)
    cluster.transport.crash(Address(Role.SERVER, 0, 1), after=7 if told else 30, tell=told)

    def script(scripted: ScriptedWorker) -> None:
        scripted.open()
        for _ in range(50):
            scripted.step(scripted.numbers())

    with pytest.raises(error, match=words):
        cluster.play(script)
    assert cluster.sim.now < 10


ON_THE_WAY = ("core", "comm/transport", "training/parameters", "training/data")
ALSO = ("training/worker.py", "training/adopted_optimizer.py")
ALSO += ("launch/runtime/process_host.py", "launch/runtime/worker_connections.py")


def test_defect_12_nothing_on_the_path_of_a_message_sleeps():
    """A wait is on a condition or a descriptor, woken by what is awaited; never `sleep` and look again."""
    root, found = Path(topotrain.__file__).parent, []
    files = [path for folder in ON_THE_WAY for path in sorted((root / folder).rglob("*.py"))]
    files += [root / name for name in ALSO]
    for path in files:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "sleep" in text else ():
            slept = isinstance(node, ast.Attribute) and node.attr == "sleep" and getattr(node.value, "id", "") == "time"
            imported = (
                isinstance(node, ast.ImportFrom) and node.module == "time" and "sleep" in [a.name for a in node.names]
            )
            if slept or imported:
                found.append(f"{path.name}:{node.lineno}")
    assert not found
