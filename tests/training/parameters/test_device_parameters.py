"""Parameters beside the flat buffers, as on a GPU: the same jobs, with the same bits, and copies that arrive late.

No GPU is needed: `DeviceParameters` is forced upon CPU parameters, with copiers that behave like a GPU's stream. What
happens on a real one is in test_cuda.py.
"""

import threading
from collections.abc import Callable
from itertools import count, cycle
from types import SimpleNamespace

import pytest
import torch
from in_process_job import (
    Cnn,
    Transformer,
    adam,
    building,
    cross_entropy,
    images,
    job_of,
    mlp,
    plain,
    reference,
    run_local,
    sgd,
    tokens,
    usual_loop,
    vectors,
)
from torch import nn
from training_loops import ALWAYS, EDITS, scaled

from topotrain.config.job import Apply, Cluster, ConfigError, Grads, Job, LRGen, Pull, Updater
from topotrain.training.parameters import flat_parameters
from topotrain.training.parameters.device_copy import WORTH_PINNING, ImmediateCopier, PinnedStorages
from topotrain.training.parameters.device_parameters import CopiedParameters, DeviceParameters, HostParameters
from topotrain.training.parameters.devices import chosen, device_of


class LateCopier:
    """Copies home happen when somebody waits for them, or at every third question; a place that is read has to stay.

    bouncing: no flat buffer can be reached.
    """

    def __init__(self, bouncing: bool) -> None:
        self._bouncing = bouncing
        self._numbers = count()
        self._homeward: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._read: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.questions = self.late = 0

    def copy_to_host(self, source, place):
        self._homeward.append((next(self._numbers), source, place))

    def copy_to_device(self, pairs):
        self.reach(next(self._numbers))
        for target, place in pairs:
            target.copy_(place)
            self._read.append((next(self._numbers), place, place.clone()))

    def reach(self, number):
        self._settled(number)  # a place may be read first and then be copied into
        due = [copy for copy in self._homeward if copy[0] <= number]
        self._homeward = [copy for copy in self._homeward if copy[0] > number]
        for _, source, place in due:
            place.copy_(source)

    def _settled(self, number):
        due = [row for row in self._read if row[0] <= number]
        self._read = [row for row in self._read if row[0] > number]
        same = [torch.equal(place.nan_to_num(), then.nan_to_num()) for _, place, then in due]
        assert all(same), "written while the device read it"

    def settle(self):
        self._settled(next(self._numbers))

    def mark(self):
        return LateMark(self, next(self._numbers))

    def reaches(self, view):
        return not self._bouncing

    def bounce(self, view):
        return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype).fill_(torch.nan)

    def close(self):
        pass


class LateMark:
    def __init__(self, copier: LateCopier, number: int) -> None:
        self._copier, self._number = copier, number

    def query(self):
        self._copier.questions += 1
        if self._copier.questions % 3:
            self._copier.late += 1
            return False
        self._copier.reach(self._number)
        return True

    def synchronize(self):
        self._copier.reach(self._number)


COPIERS: dict[str, Callable[[], object]] = {
    "direct": ImmediateCopier,
    "late": lambda: LateCopier(False),
    "bounced": lambda: LateCopier(True),
}


@pytest.fixture
def made(request, monkeypatch):
    """All parameters from here on are beside the buffers; the copiers that were made for them."""
    found = []

    def mirror(tensors, views, apart=False):
        made = {device: COPIERS[request.param]() for device in {t.device for t in tensors if not t.is_meta}}
        found.extend(made.values())
        return DeviceParameters(tensors, views, made, apart)

    monkeypatch.setattr(flat_parameters, "mirror_for", mirror)
    yield found
    assert found


late_copiers = pytest.mark.parametrize("made", ["late", "bounced"], indirect=True)
HIDDEN, LAZY = {"grads": Grads.kHidden}, {"pull": Pull.kLazy, "grads": Grads.kHidden}
ON_ARRIVAL = {"apply": Apply.kOnArrival, "grads": Grads.kHidden}
LAYOUTS = ["sandblaster", "allreduce", "two by two", "in-memory", "one"]
SCRIPTS = {
    **{script.__name__: (mlp, script) for script in (*ALWAYS, *EDITS)},
    "cnn": (Cnn, usual_loop(images(6))),
    "transformer": (Transformer, usual_loop(tokens(6))),
}
"""Models with norms, ties and buffers, and loops of all forms."""


def all_cases():
    """Each loop in some layout; each layout with hidden gradients, with buckets that are applied on arrival, and lazy.

    Copies are at once, late, or late and not from where values lie; memory is sent or shown.
    """
    layouts, copiers, shared = cycle(LAYOUTS), cycle(["late", "bounced", "late", "direct"]), cycle([False, True, True])
    for script in SCRIPTS:
        yield script, next(layouts), {}, next(copiers), next(shared)
    for more in (HIDDEN, ON_ARRIVAL, LAZY):
        for layout in LAYOUTS:
            if more is HIDDEN or layout in ("sandblaster", "allreduce", "one"):
                yield "plain", layout, more, next(copiers), next(shared)


@pytest.mark.parametrize(("script", "layout", "more", "made", "shared"), [*all_cases()], indirect=["made"])
def test_a_job_has_the_bits_of_the_reference(script, layout, more, shared, made):
    model, loop = SCRIPTS.get(script, (mlp, usual_loop(vectors(6))))
    build = building(model, adam if model is not mlp or more is HIDDEN else sgd)
    found = run_local(job_of(layout, **more), build, loop, shared)
    hidden = {"grads": more["grads"]} if more else {}
    assert found.same_bits(reference(job_of(layout, **hidden), build, loop))
    # Else no copy was ever late, and this test says nothing.
    assert script not in ("cnn", "transformer") or all(getattr(copier, "late", 1) for copier in made)


@pytest.mark.parametrize(
    ("more", "made"),
    [
        ({"fragments": 2}, "bounced"),
        ({"overlap": 1}, "bounced"),
        ({"fragments": 2, "overlap": 1}, "late"),
        ({"overlap": 2, "keep": "kBlend"}, "late"),
    ],
    indirect=["made"],
)
def test_an_outer_optimizer_with_the_values_of_workers_on_devices(more, made, monkeypatch):
    schedule = LRGen(type="kFixed", base_lr=0.7)
    outer = Updater(type="kNesterov", momentum=0.9, learning_rate=schedule)
    cluster = {"nworker_groups": 2, "sync_freq": 4, "server_worker_separate": True, "outer": outer}
    job, batches = Job(cluster=Cluster(**cluster, **more)), vectors(22)

    def script(t):
        usual_loop(batches[t.me.group :: 2])(t)

    beside = run_local(job, building(mlp, adam), script)
    assert any(copier.late for copier in made)
    monkeypatch.setattr(
        flat_parameters, "mirror_for", lambda tensors, views, apart: CopiedParameters(tensors, views) if apart else None
    )
    assert beside.same_bits(run_local(job, building(mlp, adam), script))


@late_copiers
def test_values_are_not_overwritten_while_the_device_reads_them(made):
    """Group 0 fetches twice and pushes nothing; meanwhile group 1 has changed the values."""
    turn = threading.Barrier(2, timeout=20)

    def script(t):
        first, then = (1, 1) if t.me.group == 0 else (0, 4)
        usual_loop(vectors(first))(t)
        turn.wait()
        if t.me.group == 1:
            usual_loop(vectors(then))(t)
        turn.wait()
        if t.me.group == 0:
            usual_loop(vectors(then))(t)

    result = run_local(Job(cluster=Cluster(nworker_groups=2, n_push=4)), building(), script)
    assert not result.same_bits(plain(building(), lambda t: None))


@pytest.mark.parametrize(("unscale", "made"), [(False, "late"), (True, "bounced")], indirect=["made"])
def test_a_scaler_finds_overflow_and_steps_are_skipped(unscale, made):
    """`unscale_` leaves no trace in the gradients' version counts."""
    script = scaled(2, unscale)
    assert run_local(job_of(), building(), script, True).same_bits(reference(job_of(), building(), script))


@pytest.mark.parametrize("made", ["direct"], indirect=True)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m[0].weight.data.__class__ and setattr(m[0].weight, "data", torch.zeros(26, 12)[1:]), "no longer"),
        (lambda m: m[0].weight.detach().add_(1.0), "changed outside"),
        (lambda m: m[0].weight.data.add_(1.0), "changed outside"),
        (lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(25, 12))), "not the one"),
    ],
)
def test_what_the_script_does_to_a_parameter_is_found(change, words, made):
    def script(t):
        t.backward(t.losses(cross_entropy, *vectors(1)[0]))
        change(t.model)
        t.optimizer.step()

    with pytest.raises(RuntimeError, match=words):
        run_local(job_of("one"), building(), script)


@pytest.mark.parametrize("made", ["late"], indirect=True)
def test_a_parameter_that_shares_its_own_memory_gets_new_memory(made):
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.row = nn.Parameter(torch.linspace(0.0, 1.0, 12).expand(5, 12))

        def forward(self, x):
            return x @ self.row.t()

    result = run_local(job_of("one"), building(Wide), usual_loop(vectors(3)))
    assert result.values["row"].shape == (5, 12)
    assert not torch.equal(result.values["row"][0], result.values["row"][1])


def test_the_choice_is_the_parameters():
    cpu, elsewhere = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="meta"))
    far = SimpleNamespace(device=torch.device("mps"), is_meta=False, data_ptr=lambda: 0)
    views = SimpleNamespace(view=None, own=None, regions=None)
    assert isinstance(flat_parameters.mirror_for([cpu], views), HostParameters)
    assert isinstance(flat_parameters.mirror_for([elsewhere, cpu], views), HostParameters), "another worker holds it"
    assert isinstance(flat_parameters.mirror_for([cpu, far], views), DeviceParameters)


# --- pinned memory -----------------------------------------------------------------------------------------------


def test_each_storage_is_pinned_once_and_small_ones_never():
    log = []

    def register(address, nbytes):
        log.append((address, nbytes))
        return address != refused.data_ptr()

    big, refused, small = torch.zeros(WORTH_PINNING), torch.zeros(WORTH_PINNING), torch.zeros(8)
    pins = PinnedStorages(SimpleNamespace(pin=register, unpin=log.append))
    assert [pins.pinned(t) for t in (big, big[5:], refused, refused[:1], small)] == [True, True, False, False, False]
    assert log == [(big.data_ptr(), big.nbytes), (refused.data_ptr(), refused.nbytes)]
    pins.close()
    pins.close()
    assert log[2:] == [big.data_ptr()]


# --- which GPU ---------------------------------------------------------------------------------------------------


def test_workers_take_the_gpus_of_the_list_in_turn_and_one_that_is_not_there_is_an_error():
    for gpu, in_unit, in_job, gpus, device in (
        ((), 0, 0, 0, "cpu"),
        ((), 0, 5, 2, "cuda:1"),
        ((3, 1), 0, 7, 4, "cuda:3"),
        ((3, 1), 1, 0, 4, "cuda:1"),
        ((3, 1), 2, 0, 4, "cuda:3"),
    ):
        assert chosen(gpu, in_unit, in_job, gpus) == torch.device(device)
    for gpus, words in ((2, "0 to 1"), (0, "leave the field out")):
        with pytest.raises(ConfigError, match=rf"gpu = 2.*{words}"):
            chosen((2,), 0, 0, gpus)
    # An ordinary process takes the first GPU.
    assert (device_of(None, 0), device_of(None, 4)) == (torch.device("cpu"), torch.device("cuda", 0))
