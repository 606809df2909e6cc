"""A real Ray cluster of several nodes on this machine, for the journeys: one process that builds it and waits.

Rule: it runs inside a sandbox (slurm_cluster.py) and ends with it. A file `kill-N` in its folder kills node N.
"""

import json
import os
import sys
import time
from pathlib import Path

NODES = 3
NODE = {"num_cpus": 2, "object_store_memory": 80 << 20, "node_ip_address": "127.0.0.1", "include_dashboard": False}


def main(folder: Path) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "no_monitor": True})
    nodes = [cluster.head_node, *(cluster.add_node(wait=False, **NODE) for _ in range(NODES - 1))]
    cluster.wait_for_nodes()
    (folder / "nodes").write_text(json.dumps([node.node_id for node in nodes]))
    (folder / "new").write_text(cluster.address)
    (folder / "new").rename(folder / "address")
    while True:
        for order in folder.glob("kill-*"):
            cluster.remove_node(nodes[int(order.name.partition("-")[2])], allow_graceful=False)
            order.unlink()
        time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
