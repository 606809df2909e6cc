"""One model and the same batches in the same order, through an entry point that the command line names.

`python entry_points.py ENTRY_POINT` under a launcher; `--hand` goes through several entry points by hand, one after
the other: trainer 0 or 1, or the servers of those entry points that have a process of their own for them.
"""

import argparse
from collections.abc import Iterator

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

SAMPLES, BATCH, EPOCHS, WORKERS = 64, 16, 3, 2
RATE, MOMENTUM = 0.1, 0.9
CONF = f"""
train_steps: {EPOCHS * SAMPLES // BATCH}
updater {{ type: kSGD momentum: {MOMENTUM} learning_rate {{ type: kFixed base_lr: {RATE} }} }}
"""


def data() -> TensorDataset:
    x = torch.randn(SAMPLES, 40, generator=torch.Generator().manual_seed(4))
    return TensorDataset(x, x[:, :4].argmax(dim=1))


def build() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    return model, optimizer, DataLoader(data(), batch_size=BATCH)


def shares(number: int) -> Iterator[list[torch.Tensor]]:
    """What `tt.prepare` hands to worker `number`, for entry points at which the script divides its data itself."""
    own = BATCH // WORKERS
    for _ in range(EPOCHS):
        for batch in DataLoader(data(), batch_size=BATCH):
            yield [part[number * own :][:own] for part in batch]


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[torch.Tensor]) -> nn.Module:
    """The usual loop, as users have it."""
    for _ in tt.epochs(EPOCHS):
        for x, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), labels).backward()
            optimizer.step()
    return model


def prepare() -> None:
    loop(*tt.prepare(*build()))


def kvstore() -> None:
    model, _, _ = build()
    kv = tt.kvstore.create("dist_sync")
    keys, values = [name for name, _ in model.named_parameters()], [p.data for p in model.parameters()]
    kv.init(keys, values)
    kv.set_optimizer(tt.kvstore.SGD(lr=RATE, momentum=MOMENTUM), rescale_grad=1 / kv.num_workers)
    for x, labels in shares(kv.rank):
        model.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        kv.push(keys, [p.grad for p in model.parameters()])
        kv.pull(keys, out=values)
    if kv.rank == 0:
        save_file(dict(zip(keys, values, strict=True)), "kvstore.safetensors")


def trainer() -> None:
    model, _, loader = build()
    tt.Trainer(model, nn.CrossEntropyLoss(), loader).fit()


# --- by hand -----------------------------------------------------------------------------------------------------


def paddle(number: int, port: int) -> None:
    tt.init(
        is_local=False,
        port=port,
        ports_num=2,
        num_of_gradient_servers=WORKERS,
        trainer_id=number,
        save_dir="paddle",
    )
    prepare()
    tt.leave()


def tensorflow(number: int, ports: list[int]) -> None:
    """`number` WORKERS: the ps task."""
    ps, *workers = (f"localhost:{port}" for port in ports)
    cluster = tt.train.ClusterSpec({"ps": [ps], "worker": workers})
    job, task = ("worker", number) if number < WORKERS else ("ps", 0)
    server = tt.train.Server(cluster, job, task, sync=True, workspace="tensorflow")
    if job == "ps":
        server.join()
        return
    with tt.train.device(tt.train.replica_device_setter(cluster=cluster)):
        model, optimizer, loader = build()
    optimizer = tt.train.SyncReplicasOptimizer(optimizer, WORKERS)
    loop(*tt.prepare(model, optimizer, loader))
    tt.leave()


def parallelize(number: int) -> None:
    model, optimizer, _ = build()
    batches = list(shares(number))

    def forward(model: tt.data_parallel.Model, loss_scale: float) -> list[torch.Tensor]:
        x, labels = model.batch
        return [nn.functional.cross_entropy(model(x), labels) * loss_scale]

    net = tt.data_parallel.Parallelize(
        model,
        lambda model: batches,
        forward,
        lambda model: optimizer,
        devices=[0],
        rendezvous={
            "kv_handler": tt.data_parallel.FileStoreHandler("store"),
            "shard_id": number,
            "num_shards": WORKERS,
            "engine": "GLOO",
            "exit_nets": None,
        },
        cpu_device=True,
        workspace="parallelize",
        param_update_builder_fun=None,
        shared_model=True,
    )
    # In the order of Caffe2's trainer: the nets are made, and then the checkpoint is read.
    checkpoint = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0 + number)
    tt.data_parallel.RunInitNet(net)
    if number == 0:
        model.load_state_dict(checkpoint)
    tt.data_parallel.FinalizeAfterCheckpoint(net)
    tt.data_parallel.RunNet(net, len(batches))
    net.finalize()


def by_hand(who: str, ports: list[int]) -> None:
    if who == "servers":
        from topotrain.tools.cli.app import app

        flags = ["--num_of_gradient_servers=2", f"--port={ports[0]}", "--ports_num=2", "--use_gpu=False"]
        app(["pserver", *flags], standalone_mode=False)
        tensorflow(WORKERS, ports[2:])
        return
    number = int(who)
    paddle(number, ports[0])
    tensorflow(number, ports[2:])
    parallelize(number)


ENTRY_POINTS = {"prepare": prepare, "kvstore": kvstore, "trainer": trainer}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("entry_point", nargs="?", choices=ENTRY_POINTS)
    parser.add_argument("--hand", choices=["0", "1", "servers"])
    parser.add_argument("--ports", type=int, nargs="*", default=[], help="two of the pserver, ps, two workers")
    options = parser.parse_args()
    if options.hand is not None:
        by_hand(options.hand, options.ports)
    else:
        ENTRY_POINTS[options.entry_point]()


if __name__ == "__main__":
    main()
