"""Units started one by one with `topotrain unit`: on this machine, and on hosts of their own in network namespaces."""

import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from free_ports import free_port
from job_runner import PROGRAMS, JobRunner
from process_pool import client
from shells import alive
from unit_hosts import UNIT, HostNetwork, Job, Units

pytestmark = pytest.mark.journey

ALLREDUCE = "nworkers_per_group: 2 nservers_per_group: 2"
ALLREDUCE_OF_FOUR = "nworkers_per_group: 4 nworkers_per_procs: 2"
ROOT = Path(__file__).parents[2]
OTHER = "b" * 64
SNIFFER = """
import socket, sys
heard = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
print("ready", flush=True)
with open(sys.argv[1], "wb") as file:
    while True:
        file.write(heard.recv(65536))
        file.flush()
"""


def gone(pids: Sequence[int]) -> bool:
    """Within what the product promises."""
    until = time.monotonic() + 10
    while alive(pids) and time.monotonic() < until:
        time.sleep(0.05)
    return not alive(pids)


# ---- several hosts ---------------------------------------------------------------------------------------------------


def test_two_hosts_all_reduce_over_tls(runner: JobRunner, units: Units, network: HostNetwork) -> None:
    """The workers of a host send one sum."""
    cluster = f"{ALLREDUCE_OF_FOUR} nservers_per_group: 2"
    heard = runner.folder / "heard"
    sniffer = subprocess.Popen(
        [*network.prefix(0), sys.executable, "-c", SNIFFER, str(heard)],
        stdout=subprocess.PIPE,
    )
    try:
        assert sniffer.stdout is not None
        assert sniffer.stdout.readline() == b"ready\n"
        job = units.job(cluster, "small.py", hosts=[0, 1], network=network)
        with network.listening(0) as first, network.listening(1) as second:
            job.start(0)
            code, _, err = job.start(1, token=OTHER).end()  # a stranger
            assert code == 1
            assert "another secret than this process" in err
            job.start(1)
            job.end_well()
    finally:
        sniffer.kill()
        with sniffer:
            pass
    alone = runner.run(cluster, "small.py", name="alone")
    job.check_bits(alone.final)
    report = job.report
    assert report["layout"]["link_mbit"] > 0
    assert (report["metrics"], report["samples"]) == (alone.report["metrics"], alone.report["samples"])
    assert {process["unit"] for process in report["processes"]} == {0, 1}
    assert outside(job) == {f"tls://{address}" for address in network.addresses}
    assert [first.addresses, second.addresses] == [{address} for address in network.addresses]
    bytes_heard = heard.read_bytes()
    assert len(bytes_heard) > 100_000  # all gradients went this way
    for clear in (b"ttHS", b"nworkers_per_group", b"worker 0/1"):
        assert clear not in bytes_heard


def outside(job: Job) -> set[str]:
    """The addresses of processes for other hosts, without their ports."""
    return {re.sub(r":\d+$", "", address) for address in job.addresses() if not address.startswith("unix:")}


def test_two_hosts_all_reduce_with_gloo(runner: JobRunner, units: Units, network: HostNetwork) -> None:
    job = units.job(f"{ALLREDUCE} engine: kGloo", "small.py", hosts=[0, 1], network=network)
    with network.listening(0) as first, network.listening(1) as second:
        job.run()
    assert "kGloo has neither encryption nor authentication" in job.said[0]
    alone = runner.run(ALLREDUCE, "small.py", name="alone").final
    assert job.final.keys() == alone.keys()
    for name, value in alone.items():
        torch.testing.assert_close(job.final[name], value, rtol=1e-6, atol=1e-6)
    # Gloo itself would ask for the host's name; torch's own store would listen everywhere.
    assert [first.addresses, second.addresses] == [{address} for address in network.addresses]


def test_the_two_shells_of_the_page(runner: JobRunner, network: HostNetwork) -> None:
    """docs/hosts.md as it stands, at our addresses and with a smaller script: Downpour on two hosts."""
    page = (ROOT / "docs" / "hosts.md").read_text(encoding="utf-8")
    make, *shells = re.findall(r"^```shell\n(.*?)\n```$", page, re.DOTALL | re.MULTILINE)
    assert len(shells) == 2
    subprocess.run(["sh", "-c", make.replace("python", sys.executable)], cwd=runner.folder, check=True)
    shutil.copytree(ROOT / "examples", runner.folder / "examples")
    url = f"tcp://{network.addresses[0]}:{free_port()}"
    started = []
    for rank, shell in reversed(list(enumerate(shells))):
        unit = f"{' '.join((*client(network.warm_at(rank)), *UNIT))} --forkserver {network.served_at(rank)}"
        assert "examples/digits.py --epochs 5" in shell or rank
        text = shell.replace("tcp://10.0.0.1:29400", url).replace("topotrain unit", unit)
        text = text.replace("examples/digits.py --epochs 5", str(PROGRAMS / "small.py"))
        words, both = (
            [*network.prefix(rank), "sh", "-c", text],
            {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT},
        )
        started.append(subprocess.Popen(words, cwd=runner.folder, text=True, **both))
    said = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert "main says hello" in said[1] and "Downpour" in said[1]
    assert (runner.folder / "workspace" / "two-hosts" / "final.safetensors").exists()


def test_a_host_that_falls_off_the_network(units: Units, network: HostNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    # A unit that has gone is not waited for as long as in the product; so long units have at the start, too.
    monkeypatch.setenv("TOPOTRAIN_MEETING_S", "8")
    job = units.job(ALLREDUCE, "wrong.py", "endless", hosts=[0, 1], network=network)
    job.start_hastily(0, 1)
    job.units[0].until("training")
    pids = job.pids()
    network.set_link(1, "down")
    try:
        ended = job.end()
    finally:
        network.set_link(1, "up")
    assert [code for code, _, _ in ended.values()] == [1, 1]
    assert f"unit 1 on {socket.gethostname()} vanished" in ended[0][2]
    until = time.monotonic() + 10  # what the product promises
    while alive(pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(pids)


def test_a_unit_that_comes_back_on_another_host(units: Units, network: HostNetwork) -> None:
    """Unit 0 is reached on the loopback address at first, and by its host's address then."""
    job = units.paced(ALLREDUCE, 2, hosts=[0, 0], network=network)
    job.begin()
    assert all("127.0.0.1" in address or address.startswith("unix:") for address in job.addresses())
    job.units[1].kill()
    job.hosts = [0, 1]
    job.start_hastily(1)
    job.end_well()
    job.check_ledger(2)
    assert outside(job) == {f"tls://{address}" for address in network.addresses}
