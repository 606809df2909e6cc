"""The files that tie other libraries in: who may import them, what they say, and when a batch counts."""

import subprocess

import pytest
import torch
from process_pool import client
from test_imports import LIBRARIES as FILES
from test_imports import PACKAGE, read

from topotrain.comm.router import RouterConfig
from topotrain.comm.store import open_store
from topotrain.compat.integrations import external_loop
from topotrain.config.job import Cluster, ConfigError, Job, Shard
from topotrain.config.topology import Address, Role, layout
from topotrain.launch.runtime.worker_connections import WorkerConnector
from topotrain.training import api, context
from topotrain.training.data.distributed_loader import ShardedLoader
from topotrain.training.worker_extension import WorkerExtension

LIBRARIES = {
    "accelerate": ("accelerate", "transformers"),
    "transformers": ("transformers", "transformers"),
    "lightning": ("pytorch_lightning", "lightning"),
}


def test_nobody_in_the_package_imports_them():
    """They import their library at once, for they have a class of it as a base; so only scripts may import them."""
    ours = {f"topotrain.compat.integrations.{name}" for name in LIBRARIES}
    found = [
        use.complain("only scripts import it")
        for reader in read(PACKAGE)
        for use in reader.imports
        if use.file != "compat/integrations/transformers.py"
        and any((use.name + ".").startswith(f"{name}.") for name in ours)
    ]
    assert not found
    assert {f"compat/integrations/{name}.py" for name in LIBRARIES} == {
        file for library, _ in LIBRARIES.values() for file in FILES[library]
    }


FRESH = """
import importlib, importlib.util, sys, types

for name, library in (("accelerate", "accelerate"), ("transformers", "transformers")):
    sys.modules.update(dict.fromkeys([library]))
    try:
        importlib.import_module(f"topotrain.compat.integrations.{name}")
    except ImportError as error:
        print(name, error)
# None in sys.modules would look like a package that the script has imported.
find, importlib.util.find_spec = importlib.util.find_spec, lambda name: None
try:
    import topotrain.compat.integrations.lightning
except ImportError as error:
    print("lightning", error)
importlib.util.find_spec = find

from topotrain.compat.integrations.lightning import TopotrainStrategy

for name in ("pytorch_lightning", "lightning.pytorch"):
    base = type("SingleDeviceStrategy", (), {"__init__": lambda self, device: None, "of": name})
    sys.modules[name + ".strategies"] = types.SimpleNamespace(SingleDeviceStrategy=base)
sys.modules["pytorch_lightning"] = types.SimpleNamespace(__spec__=object())
assert TopotrainStrategy().of == type("Own", (TopotrainStrategy,), {})().of == "pytorch_lightning"
"""


@pytest.mark.journey
def test_a_missing_library_is_named_and_a_strategy_is_of_the_package_that_the_script_imports(warm_at):
    """Also where the script imports it after topotrain's file."""
    words = [*client(warm_at), "-c", FRESH]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    for line, (name, (_, extra)) in zip(done.stdout.splitlines(), LIBRARIES.items(), strict=True):
        assert line.startswith(f"{name} ") and line.endswith(f"is not installed: pip install 'topotrain[{extra}]'")


class Book:
    def __init__(self):
        self.told = []

    def __getattr__(self, name):
        return lambda *args: self.told.append((name, *args))


def test_a_batch_counts_when_it_is_handed_on():
    book = Book()
    handing = external_loop.ExternalAccounting(book)
    handing.drawn(7, 0, 4.0, 4)
    handing.drawn(7, 1, 3.0, 3)
    assert book.told == []
    assert handing.hand_on() == 4.0
    assert book.told == [("drawn", 7, 0, 4.0, 4, 0)]
    handing.left_early(0, 2)
    assert handing.hand_on() == 0.0
    assert book.told[1:] == [("left_early", 0, 2)]


def plan_of(here, model, load):
    return api._data_plan(here, [model], False)


@pytest.fixture
def tied(tmp_path, monkeypatch):
    """Tie a loader of `batches` batches in a worker of two groups; the job's transports are left out."""

    def tie(batches, shard=Shard.kAuto, group=1, **how):
        job = Job(shard=shard, cluster=Cluster(nworker_groups=2, server_worker_separate=True))
        place = RouterConfig.of(
            layout(job.cluster), job, open_store(tmp_path.as_uri()), bytes(32), tmp_path, 0, "127.0.0.1"
        )
        here = context.Context(place, Address(Role.WORKER, group, 0), tmp_path, Book(), WorkerConnector())
        monkeypatch.setattr(context, "_current", here)

        def prepare(*objects):
            (thing, *_) = objects
            loads = isinstance(thing, torch.utils.data.DataLoader)
            return ShardedLoader(thing, plan_of(here, torch.nn.Linear(1, 1), thing), None, Book()) if loads else objects

        monkeypatch.setattr(api, "prepare", prepare)
        return external_loop.tie(torch.nn.Linear(1, 1), [], torch.utils.data.DataLoader(range(batches)), **how)[0]

    return tie


def test_a_loop_that_goes_by_the_number_of_batches_gets_just_so_many(tied):
    for group, part in enumerate(([0, 2, 4], [1, 3])):
        for shard in (Shard.kAuto, Shard.kStatic):
            share = tied(5, shard, group, counted=True)
            assert len(share) == len(list(share)) == len(part)
    assert tied(5)._plan.mode == "lease"


def test_what_a_counted_loop_cannot_go_by_is_refused(tied):
    with pytest.raises(ConfigError, match="shard = 'kLease': must be kAuto or kStatic"):
        tied(5, Shard.kLease, counted=True)
    with pytest.raises(ConfigError, match="at least 2 batches, one for each worker group"):
        tied(1, counted=True)


def test_its_steps_cannot_be_repeated(tied):
    tied(5)
    here = context.current()
    assert here is not None and "another library's" in here.unrepeatable


def test_outside_a_job_nothing_is_hidden_or_refused(monkeypatch):
    assert context.current() is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    external_loop.hide_launcher()
    assert external_loop.os.environ["WORLD_SIZE"] == "2"
    external_loop.refuse("resume_from_checkpoint", True, "must be left out")
    external_loop.with_final_values(WorkerExtension())
