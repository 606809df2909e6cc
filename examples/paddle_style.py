"""Paddle's way to start a job: pservers and trainers by hand, in shells or on hosts of their own, in any order.

    topotrain pserver --num_of_gradient_servers=2                        # once, here or elsewhere
    python examples/paddle_style.py --num_of_gradient_servers=2 --trainer_id=0
    python examples/paddle_style.py --num_of_gradient_servers=2 --trainer_id=1

Alone (`python examples/paddle_style.py`) it is an ordinary script.
"""

import argparse

import torch
from digits import accuracy, build_model, read_digits
from torch import nn
from torch.utils.data import DataLoader

import topotrain as tt


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to read digits, as a trainer of Paddle did.")
    parser.add_argument("--num_of_gradient_servers", type=int, default=0, help="how many trainers; 0: this one, alone")
    parser.add_argument("--trainer_id", type=int, default=0)
    parser.add_argument("--pservers", default="127.0.0.1", help="hosts, separated by commas")
    parser.add_argument("--port", type=int, default=7164)
    parser.add_argument("--ports_num", type=int, default=1)
    parser.add_argument("--async_sgd", action="store_true", help="trainers do not wait for each other")
    parser.add_argument("--save_dir", default="workspace/pserver")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    tt.init(
        use_gpu=False,
        port=options.port,
        ports_num=options.ports_num,
        is_local=options.num_of_gradient_servers == 0,
        num_of_gradient_servers=max(options.num_of_gradient_servers, 1),
        pservers=options.pservers,
        trainer_id=options.trainer_id,
        async_sgd=options.async_sgd,
        save_dir=options.save_dir,
    )
    torch.manual_seed(0)
    train, test = read_digits()
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer, loader = tt.prepare(model, optimizer, DataLoader(train, batch_size=64, shuffle=True))
    for _ in tt.epochs(options.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    tt.report(accuracy=lambda: accuracy(model, test))


if __name__ == "__main__":
    main()
