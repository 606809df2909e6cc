"""A model on several shards without a job around it, and its snapshots on disk.

Gradients are a function of the parameter, the element and the step, so any number of shards computes the same values.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from topotrain.config.job import Cluster, Job, Slicing
from topotrain.config.topology import Address, Role, layout
from topotrain.core.model.schema import PrivateMemory
from topotrain.core.optim.adapter import describe, hyper
from topotrain.core.optim.state_table import merge, model_file, state_file, to_rows
from topotrain.core.server.parameter_shard import ParameterShard, ShardMemory, open_model
from topotrain.core.server.server_extension import ExtensionHooks
from topotrain.extensions.checkpointing.checkpoint_reader import MODEL, STATE, WORKERS, Manifest, workers_file
from topotrain.extensions.checkpointing.checkpoint_writer import SnapshotFiles, _joined
from topotrain.extensions.checkpointing.shard_snapshot import ShardFreezer, TensorSlice
from topotrain.training.parameters.flat_parameters import describe_model
from topotrain.training.worker import plan_of


class Net(nn.Module):
    """Several dtypes, rows that do not lie in order, an empty parameter, a tied one, and one without gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.conv = nn.Conv2d(5, 6, 3).to(memory_format=torch.channels_last)
        self.short = nn.Parameter(torch.randn(90).to(torch.bfloat16))
        self.long_ = nn.Parameter(torch.randn(33, dtype=torch.float64))
        self.head = nn.Linear(40, 7)
        self.tied = self.head.weight
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.idle = nn.Parameter(torch.randn(70))


class Vault:
    """A model on `shards` servers; `make` gives the optimizer."""

    def __init__(self, make=torch.optim.Adam, shards: int = 2, slicing=Slicing.kElement, net=Net, **settings) -> None:
        cluster = Cluster(nservers_per_group=shards, slicing=slicing, server_worker_separate=True)
        self.job, self.net = Job(cluster=cluster), net()
        self.topology = layout(cluster)
        self.parts = describe_model(self.net)
        self.optimizer = make(self.net.parameters(), lr=0.05, **settings)
        spec = describe(self.optimizer, self.parts.tensors, slicing)
        self.schema, self.map = plan_of(self.topology, self.parts, spec)
        self.models = [self._shard(shard) for shard in range(shards)]
        self.step = 0

    def _shard(self, shard: int) -> ParameterShard:
        me = Address(Role.SERVER, 0, shard)
        model = open_model(
            me, self.job, self.topology, self.schema, self.map, ShardMemory(PrivateMemory()), ExtensionHooks(())
        )
        for segment in self.map.segments_of(shard):
            tensor = self.parts.tensors[segment.parameter].detach()
            flat = tensor.as_strided((tensor.numel(),), (1,))[segment.start :][: segment.hi - segment.lo]
            lo, _ = model.flats.range(segment.space)
            model.flats.flat("values", segment.space)[segment.lo - lo : segment.hi - lo] = flat
        return model

    def train(self, steps: int) -> "Vault":
        for _ in range(steps):
            self.step += 1
            for model in self.models:
                for unit in model.units:
                    unit.update.apply(hyper(self.optimizer), dict(self._gradients(model, unit)))
        return self

    def _gradients(self, model: ParameterShard, unit):
        for key, places in unit.places.items():
            segment = self.map.segments[key]
            parameter = self.map.parameters[segment.parameter]
            if parameter.name == "idle":
                yield key, None
                continue
            rng = torch.Generator().manual_seed(1000 * self.step + segment.parameter)
            whole = torch.randn(parameter.count, generator=rng).to(getattr(torch, parameter.dtype))
            start = 0 if unit.whole else segment.start + places[0].piece.lo - segment.lo
            part = whole[start : start + places[-1].hi]
            yield key, part.as_strided(parameter.shape, parameter.stride) if unit.whole else part

    def values(self) -> dict[str, torch.Tensor]:
        """All parameters, flat, as they lie in memory."""
        found = {p.name: torch.zeros(p.count, dtype=getattr(torch, p.dtype)) for p in self.map.parameters}
        for model, shard in zip(self.models, range(len(self.models)), strict=True):
            for slab in ShardFreezer(model, shard).freeze().values:
                found[slab.name][slab.lo : slab.lo + slab.body.numel()] = slab.body
        return found

    def write(
        self,
        files: SnapshotFiles,
        number: int,
        left: Mapping[Address, torch.Tensor] | None = None,
        step: int | None = None,
        **facts: object,
    ) -> Path:
        """What the hosts of a job do, one after the other."""
        frozen = [ShardFreezer(model, shard).freeze() for shard, model in enumerate(self.models)]
        table = merge([each.table for each in frozen], self.map.parameters)
        sums = [
            files.write(
                number,
                {
                    MODEL: (model_file(self.map.parameters), each.values),
                    STATE: (state_file(self.map.parameters, table), each.state),
                },
                first=shard == 0,
            )
            for shard, each in enumerate(frozen)
        ]
        left = {Address(Role.WORKER, 0, 0): torch.arange(50, dtype=torch.uint8)} if left is None else left
        slabs = [TensorSlice(str(worker), 0, data) for worker, data in left.items()]
        kept = files.write(number, {WORKERS: (workers_file({w: d.numel() for w, d in left.items()}), slabs)}, True)
        data = {
            "format": 1,
            "number": number,
            "job": "vault",
            "conf": "",
            "version": self.step,
            "clocks": [[0, 3]],
            "steps": [[0, self.step]],
            "first_epoch": 0,
            "epochs": [[0, [[0, self.step]]]],
            "hyper": [],
            "model": self.schema.text(),
            "optimizer": to_rows(table),
            "workers": [[w.group, w.index, d.numel()] for w, d in left.items()],
            "files": {**{name: _joined(part[name] for part in sums) for name in (MODEL, STATE)}, **kept},
            **facts,
        }
        files.publish(number, data, step)
        return files.folder / f"{number:06d}"


def read(manifest: Manifest) -> dict[str, torch.Tensor]:
    """Every value and every tensor of the state that a snapshot has, as they lie in memory."""
    found = {}
    for parameter in manifest.parameters:
        found[parameter.name] = torch.empty(parameter.count, dtype=getattr(torch, parameter.dtype))
        manifest.values(parameter.name, 0, found[parameter.name])
    for index, state in manifest.table.items():
        for entry, held in state.items():
            name = f"{manifest.parameters[index].name}/{entry}"
            if held.kind == "number":
                found[name] = torch.tensor(held.value, dtype=torch.float64)
                continue
            told = manifest.files[STATE].entries[name]
            found[name] = torch.empty(told.count, dtype=getattr(torch, held.dtype))
            manifest.state(manifest.parameters[index].name, entry, 0, found[name])
    for worker in manifest.workers:
        found[f"worker {worker}"] = torch.frombuffer(bytearray(manifest.worker(*worker) or b"\0"), dtype=torch.uint8)
    return found


def equal(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
