"""A split model's parameters in real workers: each holds its own, and worker (0,0) gets the whole result."""

from dataclasses import replace

import pytest
import torch
from in_process_job import job_of, run_hosted, run_local
from torch import nn

import topotrain.training.parameters.flat_parameters
from topotrain.comm.transport.shared_memory import ProcessMemory
from topotrain.config.job import ConfigError, Grads, Job, Partition
from topotrain.config.sharding import SchemaError, cut
from topotrain.config.topology import layout
from topotrain.core.model.schema import FlatBuffers, effective, slice_map_for
from topotrain.extensions.assignment.assignment_scope import AssignmentScope
from topotrain.extensions.assignment.script_place import ScriptPlace
from topotrain.extensions.host_sums.host_reduction import HostReduction
from topotrain.parallel.placement.assign_modules import Assignment
from topotrain.parallel.placement.parameter_owners import divide
from topotrain.parallel.runtime.local_model import localise
from topotrain.training.gradients.push_path import PushPath
from topotrain.training.parameters.device_copy import ImmediateCopier
from topotrain.training.parameters.device_parameters import DeviceParameters
from topotrain.training.parameters.flat_parameters import FileMemory, ModelBuffers, ModelParts, describe_model

PLACES = {
    "left": Assignment(-1, 0),
    "right": Assignment(-1, 1),
    "tied": Assignment(-1, 0),
    "again": Assignment(-1, 1),
    "common": Assignment(0),
}
OWNERS = {"left.weight": (0,), "right.weight": (1,), "tied.weight": (), "common.weight": ()}
STEPS = 5


class Held(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))
        self.register_buffer("stat", torch.zeros(3))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = Held(30, 7), Held(30, 7)
        self.tied, self.again, self.common = Held(130), Held(130), Held(11)
        self.again.weight = self.tied.weight


def build():
    model = Model()
    return model, torch.optim.Adam(model.parameters(), lr=0.003, fused=True)  # as the servers compute it


def split(me, model, optimizer) -> ModelParts:
    """What worker `me` holds of the model; the rest is on the meta device, in the model and in the optimizer."""
    return localise(model, optimizer, divide(model, PLACES, 2), me.index).parts


def push(worker: int, step: int, name: str) -> torch.Tensor:
    rng = torch.Generator().manual_seed(100 * step + 10 * worker + list(OWNERS).index(name))
    return torch.randn(dict(Model().named_parameters())[name].shape, generator=rng)


def script(t) -> None:
    me = t.me.index
    for step in range(STEPS):
        t.optimizer.zero_grad()
        t.worker.drawn(1 << 40, step, 4.0, 4)
        here = {name: p for name, p in t.model.named_parameters() if not p.is_meta}
        sum((p * push(me, step, name)).sum() for name, p in here.items()).backward()
        t.optimizer.step()
        if step == 2:  # the state is gathered from the servers, each worker its own, and handed back
            state = t.optimizer.state_dict()
            assert len(state["state"]) == len(here) == 3
            t.optimizer.load_state_dict(state)
    for buffer in t.model.buffers():
        buffer += 10 + me
    elsewhere = [s.index for s in t.worker.map.spaces if not s.on(me)]
    assert elsewhere and not [name for name, space in t.worker.buffers.flats._flat if space in elsewhere]


def expected() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model, optimizer = build()
    for step in range(STEPS):
        for name, p in model.named_parameters():
            p.grad = sum(push(worker, step, name) for worker in OWNERS[name] or (0, 1)) / 2
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def check(result) -> None:
    first, second = (handle.worker for handle in result.workers)
    for index, (name, wanted) in enumerate(expected().items()):
        assert torch.equal(first.buffers.view("params", index), wanted), name
        if not OWNERS[name] or 1 in OWNERS[name]:
            assert torch.equal(second.parts.tensors[index], wanted), name
        assert first.parts.tensors[index].is_meta == (OWNERS[name] == (1,))
    assert [float(b.mean()) for b in result.workers[0].notes["buffers"]] == [10.0, 11.0] * 2 + [10.0]
    assert isinstance(first.path, PushPath), "what nobody else has cannot be shown as the group's mean"


@pytest.mark.parametrize(("servers", "shared"), [(1, False), (2, True), (3, False)])
def test_each_worker_holds_its_own_and_the_result_is_whole(servers, shared):
    check(run_local(job_of(nworkers_per_group=2, nservers_per_group=servers), build, script, shared, split))


@pytest.mark.parametrize(("servers", "transport"), [("sandblaster", "kShm"), ("allreduce", "kTcp")])
def test_the_same_over_real_transports_and_into_files(servers, transport, tmp_path):
    def into_files(t):
        script(t)
        t.notes["folder"] = tmp_path

    job = job_of(servers, nworkers_per_group=2, nservers_per_group=2, transport=transport)
    check(run_hosted(job, build, into_files, tmp_path, describing=split))
    assert [path.name for path in tmp_path.iterdir()] == ["store"], "files without a name stay nowhere"


def test_workers_of_a_host_that_split_a_model_send_no_sums(tmp_path):
    """Their unit is on another host than the servers. The script decides that the model is split, and no field does."""

    def paced(t):
        gradients = t.exchange.gradients
        assert isinstance(gradients, HostReduction)
        script(t)
        assert not gradients.is_connected and gradients.sums == gradients.apart == 0

    job = job_of("sandblaster", nworkers_per_group=2, nworkers_per_procs=2, nservers_per_group=2, nservers_per_procs=2)
    check(run_hosted(job, build, paced, tmp_path, (0, 1), describing=split))


def test_the_same_where_parameters_are_on_a_device(monkeypatch):
    def mirror(tensors, views, apart):
        return DeviceParameters(tensors, views, {tensor.device: ImmediateCopier() for tensor in tensors})

    monkeypatch.setattr(topotrain.training.parameters.flat_parameters, "mirror_for", mirror)
    check(run_local(job_of(nworkers_per_group=2), build, script, True, split))


@pytest.mark.parametrize("shared", [False, True])
def test_each_worker_assigns_what_it_holds(shared):
    """A parameter that several hold gets the values of the first of them."""

    def assigns(t):
        scope = AssignmentScope(t.worker, ScriptPlace(None, t.worker), False)
        with scope.change(list(t.model.parameters())), torch.no_grad():
            for p in t.model.parameters():  # those of the other worker are on the meta device
                p.fill_(2.0 + t.me.index)

    result = run_local(job_of(nworkers_per_group=2, nservers_per_group=2), build, assigns, shared, split)
    first, second = (handle.worker for handle in result.workers)
    found = [float(first.buffers.view("params", index).mean()) for index in range(4)]
    assert dict(zip(OWNERS, found, strict=False)) == dict(zip(OWNERS, (2.0, 3.0, 2.0, 2.0), strict=True))
    assert [float(second.parts.tensors[index].detach().mean()) for index in (1, 2, 3)] == [3.0, 2.0, 2.0]


def test_compressed_it_is_nearly_the_same():
    result = run_local(job_of(nworkers_per_group=2, compression="kBf16"), build, script, False, split)
    for index, wanted in enumerate(expected().values()):
        assert torch.allclose(result.workers[0].worker.buffers.view("params", index), wanted, atol=0.02)


def test_memory_in_files_is_zeroed_and_a_folder_that_has_no_room_is_told(tmp_path):
    made = FileMemory(tmp_path).allocate(1000, torch.float64)
    assert made.shape == (1000,) and not made.any() and not FileMemory(tmp_path).allocate(0, torch.float32).numel()
    made.fill_(1.0)
    with pytest.raises(ConfigError, match=r"workspace = .*nowhere.*no space for 8 more bytes"):
        FileMemory(tmp_path / "nowhere").allocate(1, torch.float64)


def test_an_owner_that_no_group_has_is_refused():
    (wrong, *_) = (replace(p, owners=(0, 2)) for p in describe_model(Model()).parameters)
    with pytest.raises(
        SchemaError, match=r"'left.weight': owners = \(0, 2\): must be 0 to 1: a group of the job has 2 workers"
    ):
        slice_map_for([wrong], layout(job_of(nworkers_per_group=2).cluster))


def test_a_split_job_pushes_home_whatever_its_conf_says_of_gradients():
    whole = describe_model(Model()).parameters
    assert effective(Job(), whole).grads is Grads.kVisible
    assert effective(Job(), [replace(whole[0], owners=(0,))]).grads is Grads.kHidden
    assert effective(Job(partition=(Partition(),)), whole).grads is Grads.kHidden
    hidden = Job(grads=Grads.kHidden)
    assert effective(hidden, whole) is hidden


def test_a_parameter_that_is_elsewhere_is_left_alone():
    parts = split(layout(job_of(nworkers_per_group=2).cluster).workers(0)[0], *build())
    slice_map = cut(parts.parameters, 1)
    regions = ProcessMemory()
    buffers = ModelBuffers(parts, slice_map, FlatBuffers(slice_map, None, regions), regions=regions)
    buffers.copy_from_model("params")
    buffers.move_model()
    buffers.check()
    parts.tensors[0].grad = torch.zeros_like(parts.tensors[0])
    with torch.no_grad():
        parts.tensors[0].add_(1)
    with pytest.raises(RuntimeError, match=r"left\.weight was changed outside"):
        buffers.check()
