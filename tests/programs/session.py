"""A task of a cluster that clients drive, or such a client: what journeys start in shells."""

import argparse

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import topotrain as tt


class Net(nn.Module):
    """A layer on a server and one worker, BatchNorm and dropout on the other."""

    def __init__(self) -> None:
        super().__init__()
        with tt.device("/job:ps/task:0"):
            self.first = nn.Linear(8, 16)
        with tt.device("/job:worker/task:1"):
            self.rest = nn.Sequential(nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with tt.device("/job:worker/task:0"):
            hidden = self.first(x)
        return nn.functional.cross_entropy(self.rest(hidden), y)


def task(hosts: str, job: str, index: str) -> None:
    ps, workers = (part.split(",") for part in hosts.split("/"))
    server = tt.train.Server({"ps": ps, "worker": workers}, job, int(index), session=True)
    server.join()


def client(target: str, file: str, for_ever: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    train_op = tt.train.minimize(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    with tt.Session(target) as session:
        step = 0
        while step < 12 or for_ever:
            x = torch.randn(8 if step % 4 else 6, 8)
            session.run(train_op, x, x[:, :3].argmax(1))
            step += 1
            print(f"step {step}", flush=True)
    save_file(model.state_dict(), file)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["task", "client"])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--for-ever", action="store_true")
    options = parser.parse_args()
    if options.what == "task":
        task(*options.words)
    else:
        client(*options.words, for_ever=options.for_ever)


if __name__ == "__main__":
    main()
