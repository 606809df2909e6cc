"""The model of entry_points.py, trained by processes that are started by hand and end in several ways."""

import argparse
import os
import sys
from pathlib import Path

from entry_points import build
from torch import nn

import topotrain as tt


def beside(addresses: str, number: int, workspace: str) -> None:
    """One of several processes, each a worker and a server."""
    from topotrain.comm.security.secret import load_secret
    from topotrain.config.job import Cluster, Job
    from topotrain.config.topology import Address, Role
    from topotrain.launch.by_hand.manual_worker import ColocatedServers, StaticStore, join

    count = len(addresses.split(","))
    job = Job(cluster=Cluster(nworkers_per_group=count, nservers_per_group=count, workspace=workspace))
    me, server = Address(Role.WORKER, 0, number), Address(Role.SERVER, 0, number)
    join(job, me, StaticStore(addresses.split(",")), load_secret(os.environ), beside=ColocatedServers([server]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--paddle", default="", help="flags of tt.init: name=value,...")
    parser.add_argument("--beside", default="", help="addresses of all servers; this is the first, or --number")
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--workspace", default="")
    parser.add_argument("--wait-at", default="", help="a file: made after the first step, which is followed by many")
    parser.add_argument("--os-exit", action="store_true", help="ends itself, behind the back of Python")
    options = parser.parse_args()
    if options.paddle:
        flags = dict(word.split("=") for word in options.paddle.split(";"))
        tt.init(is_local=False, save_dir=options.workspace, **flags)
    if options.beside:
        beside(options.beside, options.number, options.workspace)
    model, optimizer, loader = tt.prepare(*build())
    for epoch in tt.epochs(10**6 if options.wait_at else 4):
        for x, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), labels).backward()
            optimizer.step()
        if options.wait_at and not epoch:
            Path(options.wait_at).touch()
    tt.report(steps=1.0)
    print("the script is over", file=sys.stderr)
    if options.os_exit:
        os._exit(0)


if __name__ == "__main__":
    main()
