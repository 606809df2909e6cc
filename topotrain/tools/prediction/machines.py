"""The machines of a prediction: cores, memory, links, stragglers and failures."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from topotrain.config.job import ConfigError, Job, Link, TransportChoice
from topotrain.config.topology import Address, Topology, layout
from topotrain.tools import amounts

MOST_HOSTS = 1 << 16
MOST_SLOWER = 1000
"""Times that a straggler may compute longer."""
_STRAGGLER = re.compile(r"(\d{1,9})x(\d+\.?\d*|\.\d+)")


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines of a job, which are all alike."""

    hosts: int = 0  # 0: one, or with a link one for each unit of the layout
    cores: int | None = None  # of each host; None: as many as the probed machine has
    link: Link | None = None  # of each host, full duplex; None: only the costs of a probed TCP transport
    # By number of a worker, over all groups: how many times longer it computes.
    stragglers: Mapping[int, float] = field(default_factory=dict)
    memory_bytes: int | None = None  # of each host; None: not limited
    mtbf_s: float | None = None  # mean time between two failures of one host; None: none fails
    emulated: bool = False  # the hosts are units on one machine (`run --emulate`), and share its cores

    def with_job(self, job: Job) -> "Machines":
        """Return these machines with the emulated link of a job, if they have none."""
        if self.link is not None or job.cluster.link is None:
            return self
        return replace(self, link=job.cluster.link, emulated=True)

    def host_of(self, topology: Topology, address: Address) -> int:
        """Return the number of the machine of a process. Emulated hosts are one machine."""
        return 0 if self.emulated else topology.host_of(address)

    def topology(self, job: Job, tcp_mbit: float = 0.0) -> Topology:
        """Place a job on these hosts: units in their order, each host with about as many.

        tcp_mbit: the speed of TCP where no link bounds it, in Mbit/s; 0: not known. As in a job, the size of the slices
        follows the speed of the slowest link. Raises ConfigError where no worker has the number of a straggler.
        """
        plain = layout(job.cluster)
        units = len(plain.units)
        workers = plain.worker_groups * plain.workers_per_group
        for number in self.stragglers:
            if number >= workers:
                raise ConfigError("--straggler", number, f"must be the number of a worker, 0 to {workers - 1}")
        hosts = min(self.hosts or (1 if self.link is None else units), units)
        # With an emulated link each unit counts as a host in any case.
        numbers = tuple(rank * hosts // units for rank in range(units))
        return layout(job.cluster, numbers, self._link_mbit(job, hosts, tcp_mbit))

    def _link_mbit(self, job: Job, hosts: int, tcp_mbit: float) -> float:
        """Return what a job would measure as the speed of its slowest link; 0: nothing."""
        if hosts == 1:
            return tcp_mbit if job.cluster.transport is TransportChoice.kTcp else 0.0
        bandwidth = None if self.link is None else self.link.bandwidth
        return tcp_mbit if bandwidth is None else min(bandwidth, tcp_mbit or bandwidth)


def _parse_count(option: str, text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_HOSTS:
        raise ConfigError(option, text, f"must be a whole number, 1 to {MOST_HOSTS}")
    return int(text)


def _parse_stragglers(text: str) -> Mapping[int, float]:
    """Parse a value such as "1x4" or "1x4,3x2.5". Raises ConfigError."""
    found: dict[int, float] = {}
    for part in text.replace(" ", "").split(","):
        match = _STRAGGLER.fullmatch(part)
        if match is not None and not 1 <= float(match[2]) <= MOST_SLOWER:
            raise ConfigError(
                "--straggler", text, f"{part!r} is no straggler: must be 1 to {MOST_SLOWER:,} times slower"
            )
        if match is None:
            accepted = "must be such as 1x4: worker 1 computes 4 times as long; several separated by commas"
            raise ConfigError("--straggler", text, f"{part!r} is no straggler: {accepted}")
        number = int(match[1])
        if number in found:
            raise ConfigError("--straggler", text, f"worker {number} is given twice")
        found[number] = float(match[2])
    return found


def parse_machines(
    hosts: str = "", link: str = "", straggler: str = "", memory: str = "", mtbf: str = "", cores: str = ""
) -> Machines:
    """Return the machines of options; empty: not given. Raises ConfigError."""
    return Machines(
        _parse_count("--hosts", hosts) if hosts else 0,
        _parse_count("--cores", cores) if cores else None,
        amounts.link("--link", link) if link else None,
        _parse_stragglers(straggler) if straggler else {},
        amounts.nbytes("--memory", memory) if memory else None,
        amounts.seconds("--mtbf", mtbf) if mtbf else None,
    )
