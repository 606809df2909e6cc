"""A unit of a job in a process of its own, parts played in place of training: prints each event, then how it ended."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.launch_targets import CALLS, small_job
from topotrain.comm.store import StoreError
from topotrain.config.job import ConfigError, Job
from topotrain.config.topology import Topology
from topotrain.core.events import Event, to_json
from topotrain.launch import AlwaysTaken
from topotrain.launch.launchers.env_tables import start_of
from topotrain.launch.multinode import node, node_membership
from topotrain.launch.multinode.node import Node


@contextmanager
def watching(job: Job, topology: Topology) -> Iterator[Any]:
    def show(event: Event) -> None:
        print(to_json(event), flush=True)

    yield show, AlwaysTaken()


def main(workspace: str, rank: str, nprocs: str, url: str, counts: str, *args: str) -> None:
    """`counts` are those of the cluster as JSON; "" for a unit that is given no job.

    The unit is started in the folder around its workspace.
    """
    os.chdir(Path(workspace).parent)
    if os.environ.get("TOPOTRAIN_TEST_HASTY"):  # a store that is away is given up soon
        node.STORE_S, node_membership.STORE_LOST_S = 0.5, 1.0
    job = small_job(Path(Path(workspace).name), args, **json.loads(counts)) if counts else None
    try:
        ended = Node(start_of({}, int(rank), int(nprocs), url), job, watching, calls=CALLS).run()
    except (ConfigError, StoreError) as error:
        print(error, file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    failed = ended.end.failed
    told = {"who": failed.who, "kind": failed.kind, "text": failed.text} if failed else {"text": ended.end.text}
    print(json.dumps({"ended": {**told, "unit": ended.end.unit, "host": ended.end.host}}), flush=True)
    sys.exit(ended.outcome.code)


if __name__ == "__main__":
    main(*sys.argv[1:])
