"""TensorFlow 1's way to start a job: one process per task of a cluster, by hand, in any order.

    python examples/tf_style.py --ps_hosts=localhost:2222 --worker_hosts=localhost:2223,localhost:2224 --job_name=ps
    python examples/tf_style.py (the same hosts) --job_name=worker --task_index=0
    python examples/tf_style.py (the same hosts) --job_name=worker --task_index=1

Alone (`python examples/tf_style.py`) it is an ordinary script.
"""

import argparse

import torch
from digits import accuracy, build_model, read_digits
from torch import nn
from torch.utils.data import DataLoader

import topotrain as tt


def train(options: argparse.Namespace, cluster: tt.train.ClusterSpec | None) -> None:
    torch.manual_seed(0)
    data, test = read_digits()
    with tt.train.device(tt.train.replica_device_setter(cluster=cluster)):
        model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if options.sync and cluster is not None:
        workers = cluster.num_tasks("worker")
        optimizer = tt.train.SyncReplicasOptimizer(optimizer, replicas_to_aggregate=workers, total_num_replicas=workers)
    model, optimizer, loader = tt.prepare(model, optimizer, DataLoader(data, batch_size=64, shuffle=True))
    for _ in tt.epochs(options.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    tt.report(accuracy=lambda: accuracy(model, test))


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to read digits, as a task of TensorFlow did.")
    parser.add_argument("--ps_hosts", default="", help="HOST:PORT of every ps task, separated by commas; none: alone")
    parser.add_argument("--worker_hosts", default="", help="HOST:PORT of every worker task, separated by commas")
    parser.add_argument("--job_name", choices=["ps", "worker"], default="worker")
    parser.add_argument("--task_index", type=int, default=0)
    parser.add_argument("--sync", action="store_true", help="workers take every step together; on all tasks")
    parser.add_argument("--workspace", default="workspace/tensorflow")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    cluster = None
    if options.ps_hosts:
        hosts = {"ps": options.ps_hosts.split(","), "worker": options.worker_hosts.split(",")}
        cluster = tt.train.ClusterSpec(hosts)
        server = tt.train.Server(
            cluster,
            job_name=options.job_name,
            task_index=options.task_index,
            sync=options.sync,
            workspace=options.workspace,
        )
        if options.job_name == "ps":
            server.join()
            return
    train(options, cluster)


if __name__ == "__main__":
    main()
