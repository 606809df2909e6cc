"""TensorFlow 1's client session: tasks that have no script of their own, and a client that drives them.

    python examples/session.py --job_name=ps
    python examples/session.py --job_name=worker --task_index=0
    python examples/session.py --job_name=worker --task_index=1
    python examples/session.py --target=tcp://localhost:2223

Each in a shell of its own; the tasks stay until they are stopped (Ctrl-C), for one client after the other. Alone
(`python examples/session.py`) the client computes by itself.
"""

import argparse

import torch
from digits import accuracy, read_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader

import topotrain as tt


class Net(nn.Module):
    """Reads digits, in two halves on two workers; returns the loss where it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        with tt.device("/job:worker/task:0"):
            self.conv = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        with tt.device("/job:worker/task:1"):
            self.head = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        scores = self.head(self.conv(images))
        if labels is None:
            return scores
        with tt.device("/job:worker/task:1"):
            return nn.functional.cross_entropy(scores, labels)


def train(target: str, epochs: int) -> None:
    torch.manual_seed(0)
    data, test = read_digits()
    model = Net()
    train_op = tt.train.minimize(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    loader = DataLoader(data, batch_size=64, shuffle=True)
    with tt.Session(target) as session:
        for epoch in range(epochs):
            for images, labels in loader:
                loss = session.run(train_op, images, labels)
            print(f"epoch {epoch}: loss {loss:.4f}")
    tt.report(accuracy=accuracy(model, test))  # the session has brought the values home


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to read digits, as a client of a cluster.")
    parser.add_argument("--ps_hosts", default="localhost:2222", help="HOST:PORT of every ps task, separated by commas")
    parser.add_argument("--worker_hosts", default="localhost:2223,localhost:2224", help="the same of every worker task")
    parser.add_argument("--job_name", choices=["ps", "worker", "client"], default="client")
    parser.add_argument("--task_index", type=int, default=0)
    parser.add_argument("--target", default="", help="tcp://HOST:PORT of a worker task; none: this process computes")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    if options.job_name == "client":
        try:
            train(options.target, options.epochs)
        except tt.ConfigError as error:  # nobody there, or another cluster's token: a line says it
            parser.error(str(error))
        return
    cluster = {"ps": options.ps_hosts.split(","), "worker": options.worker_hosts.split(",")}
    server = tt.train.Server(cluster, job_name=options.job_name, task_index=options.task_index, session=True)
    print(server.target, flush=True)
    server.join()


if __name__ == "__main__":
    main()
