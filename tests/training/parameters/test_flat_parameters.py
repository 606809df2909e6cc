"""The user's model over flat memory: what stays tied, and how a cut tie is found."""

import io
from pathlib import Path

import pytest
import torch
from in_process_job import Cnn, Transformer, cross_entropy, mlp, vectors
from torch import nn
from torch.nn.utils import prune

from topotrain.comm import private_views
from topotrain.comm.transport.shared_memory import ProcessMemory
from topotrain.config.job import ConfigError
from topotrain.config.sharding import cut
from topotrain.core.model.schema import FlatBuffers
from topotrain.training.parameters.flat_parameters import ModelBuffers, describe_model


def moved(model):
    """A model whose parameters live in flat buffers, as after `prepare`."""
    parts = describe_model(model)
    slice_map = cut(parts.parameters, 2)
    regions = ProcessMemory()
    buffers = ModelBuffers(parts, slice_map, FlatBuffers(slice_map, None, regions), regions=regions)
    buffers.copy_from_model("params")
    buffers.move_model()
    return buffers, parts


def check(buffers, parts):
    """As a step with a gradient of every parameter."""
    for tensor in parts.tensors:
        tensor.grad = torch.zeros_like(tensor) if tensor.is_floating_point() else None
    buffers.check()


def anonymous_bytes():
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) * 1024


@pytest.mark.skipif(not hasattr(private_views._libc, "malloc_trim"), reason="the C library keeps freed memory")
def test_the_memory_of_the_scripts_own_parameters_is_given_back():
    model = nn.ParameterList(torch.ones(1 << 14) for _ in range(1 << 10))
    above = torch.ones(1 << 10)  # behind the parameters, where the heap could not become shorter
    before = anonymous_bytes()
    buffers, _ = moved(model)
    assert before - anonymous_bytes() > 40 << 20
    assert above.all() and buffers.map


MODELS = {
    "mlp": (mlp, lambda: torch.randn(3, 12)),
    "cnn": (Cnn, lambda: torch.randn(3, 1, 8, 8)),
    "tied": (Transformer, lambda: torch.randint(13, (3, 6))),
    "channels last": (
        lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
        lambda: torch.randn(3, 3, 8, 8),
    ),
    "lstm": (lambda: nn.LSTM(5, 7, num_layers=2), lambda: torch.randn(4, 3, 5)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 7)), lambda: torch.randn(3, 5)),
    "bfloat16 and scalars": (
        lambda: nn.ParameterDict({"a": torch.tensor(3.0), "b": torch.ones(70, dtype=torch.bfloat16)}),
        None,
    ),
}


def output(model, x):
    found = model(x)
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("name", MODELS)
def test_a_moved_model_is_the_same_model(name):
    make, data = MODELS[name]
    torch.manual_seed(0)
    model = make()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    strides = [p.stride() for p in model.parameters()]
    objects = list(model.parameters())
    x = data() if data else None
    wanted = None if x is None else output(model.eval(), x)
    buffers, parts = moved(model)
    assert all(a is b for a, b in zip(model.parameters(), objects))
    assert [p.stride() for p in model.parameters()] == strides
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
    if x is not None:
        assert torch.equal(output(model.eval(), x), wanted)
        output(model.train(), x).float().sum().backward()
    check(buffers, parts)
    # What lands in the flat memory stands in the parameters.
    for index, p in enumerate(parts.tensors):
        buffers.view("params", index).fill_(index + 0.5)
        assert bool((p == index + 0.5).all())
    check(buffers, parts)


def test_each_parameter_has_a_storage_of_its_own():
    model = nn.Sequential(nn.Linear(1000, 300), nn.Linear(4, 2))
    moved(model)
    file = io.BytesIO()
    torch.save(model[1].bias, file)
    assert file.tell() < 5000
    assert torch.equal(torch.load(io.BytesIO(file.getvalue()), weights_only=True), model[1].bias)


def test_overlapping_and_expanded_parameters_get_memory_of_their_own():
    model = nn.Module()
    model.wide = nn.Parameter(torch.ones(1, 5).expand(4, 5))
    model.part = nn.Parameter(torch.arange(12.0).view(3, 4)[:, :2])
    buffers, parts = moved(model)
    assert [p.stride for p in parts.parameters] == [(5, 1), (2, 1)]
    buffers.view("params", 0)[0, 0] = 9.0
    assert model.wide.sum() == 28.0
    assert torch.equal(model.part, torch.tensor([[0.0, 1], [4, 5], [8, 9]]))


def test_compiled_models_have_their_own_names():
    model = torch.compile(mlp(), backend="eager")
    nested = nn.Sequential(torch.compile(nn.BatchNorm1d(3), backend="eager"))
    assert describe_model(model).parameters == describe_model(mlp()).parameters
    assert [b.name for b in describe_model(nested).buffers] == [
        "0.running_mean",
        "0.running_var",
        "0.num_batches_tracked",
    ]


def test_compiled_models_train_as_others_do():
    model = mlp()
    compiled = torch.compile(model, backend="aot_eager")
    buffers, parts = moved(compiled)
    seen = []
    for p in compiled.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    x, y = vectors(1)[0]
    first = cross_entropy(compiled, x, y)
    first.backward()
    assert len(seen) == 4
    for index, p in enumerate(parts.tensors):
        buffers.view("params", index).sub_(p.grad)
    assert cross_entropy(compiled, x, y) < first
    check(buffers, parts)


def test_only_buffers_that_are_saved_are_part_of_the_model():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    model[1].register_buffer("mask", torch.ones(2, dtype=torch.bool), persistent=False)
    model[1].register_buffer("kept", torch.ones(2, dtype=torch.bool))
    model[1].register_buffer("none", None)
    described = describe_model(model).buffers
    assert [b.name for b in described] == [n for n in model.state_dict() if not n.endswith(("weight", "bias"))]
    assert described[-1].dtype == "bool" and described[-1].nbytes == 2


# --- what survives, and what does not ----------------------------------------------------------------------------


def tie_by_data(model):
    model[0].bias.data = torch.zeros(25)
    model[2].weight.data = model[0].bias.data


def edit_in_place(model):
    with torch.no_grad():
        model[2].bias.mul_(0.5)


MOVES = {
    "cast": lambda model: model.to(torch.float64),
    "assign data": lambda model: setattr(model[2].bias, "data", torch.zeros(7)[:5]),
    "tie by data": tie_by_data,
    "to vector and back": lambda model: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(model.parameters()), model.parameters()
    ),
    "share memory": lambda model: model.share_memory(),
}
CHANGES = {
    "load": lambda model: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}),
    "edit in place": edit_in_place,
    "edit data": lambda model: model[2].bias.data.mul_(0.5),
    "edit array": lambda model: model[0].weight.detach().numpy().__setitem__((3, 4), -0.0),
    "replace data": lambda model: setattr(model[2].bias, "data", torch.zeros(5)),
}


def test_a_parameter_may_get_another_place():
    """As pruning does: the same object under another name."""
    buffers, parts = moved(model := mlp())
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    del model[2]
    check(buffers, parts)


@pytest.mark.parametrize("move", MOVES)
def test_a_parameter_that_moved_away_is_found(move):
    buffers, parts = moved(model := mlp())
    check(buffers, parts)
    MOVES[move](model)
    with pytest.raises(
        RuntimeError, match=r"parameter [\w.]+ is no longer in the memory where topotrain put it.*before tt"
    ):
        check(buffers, parts)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("readable", [True, False])
def test_nobody_else_sees_a_change_and_one_that_is_taken_back_is_none(change, readable, monkeypatch):
    """As an average that is put in for a validation. Where the kernel does not tell, values are compared."""
    if not readable:
        monkeypatch.setattr(private_views.os, "pread", lambda *args: b"")
    buffers, parts = moved(model := mlp())
    stored = [p.detach().clone() for p in model.parameters()]
    CHANGES[change](model)
    assert {index for index, _ in buffers.edited()}
    with pytest.raises(RuntimeError, match=r"parameter [\w.]+ was changed outside optimizer.step\(\)"):
        check(buffers, parts)
    for index, (p, old) in enumerate(zip(model.parameters(), stored, strict=True)):
        assert torch.equal(buffers.view("params", index), old)
        p.data = old.clone()
    check(buffers, parts)
    # What arrives afterwards is seen, also on pages that were written.
    for index, p in enumerate(model.parameters()):
        buffers.view("params", index).fill_(7.0)
        assert bool((p == 7.0).all())
    assert not list(buffers.edited())


@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_without_gradient_is_the_scripts_own(change):
    buffers, parts = moved(model := mlp())
    CHANGES[change](model)
    wanted = [p.detach().clone() for p in model.parameters()]
    written = {index for index, _ in buffers.edited()}
    for index, p in enumerate(model.parameters()):
        p.grad = None if index in written else torch.zeros_like(p)
    buffers.check()
    # New values of its neighbours on the same page arrive, and it stays as it is.
    for index, p in enumerate(model.parameters()):
        buffers.view("params", index).sub_(2.0)
        assert torch.equal(p, wanted[index] if index in written else wanted[index] - 2)
    buffers.check()
    with pytest.raises(RuntimeError, match=r"parameter [\w.]+ was changed outside .*tt.assign"):
        check(buffers, parts)


# --- what cannot be trained --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.ReLU(), "has no parameters"),
        (lambda: nn.Linear(2, 2, device="meta"), "weight = 'meta'.*on cpu or cuda"),
        (lambda: nn.LazyLinear(2), "weight = 'lazy'.*run the model once before"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_models_that_cannot_be_trained_are_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        describe_model(make())
