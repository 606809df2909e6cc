"""Snapshots on disk: their format, what other layouts read from them, and what is refused."""

import json
import os
import socket
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import pytest
import torch
from reports import TextList
from safetensors import safe_open
from safetensors.torch import load_file
from snapshot_files import Net, Vault, equal, read
from torch import nn
from wait_limit import ended_after

from topotrain.config.job import ConfigError, Slicing
from topotrain.config.topology import Address, Role
from topotrain.core.model.safetensors_layout import TensorDescription, lay_out
from topotrain.extensions.checkpointing.checkpoint_reader import (
    ASIDE,
    FOLDER,
    MANIFEST,
    MODEL,
    STATE,
    WORKERS,
    Manifest,
    hashed,
    latest,
    numbers,
)
from topotrain.extensions.checkpointing.checkpoint_writer import SnapshotFiles
from topotrain.extensions.checkpointing.shard_snapshot import restore


@pytest.fixture
def files(tmp_path):
    return SnapshotFiles(tmp_path / FOLDER)


def resume(vault, manifest):
    for shard, model in enumerate(vault.models):
        restore(model, manifest, shard)
    return vault


OPTIMIZERS = {
    "Adam": (torch.optim.Adam, {}),
    "AdamW": (torch.optim.AdamW, {"amsgrad": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "plain": (torch.optim.SGD, {}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "ASGD": (torch.optim.ASGD, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "Rprop": (torch.optim.Rprop, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
}


class Matrices(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(20, 10, bias=False), nn.Linear(10, 30, bias=False)


CUT, WHOLE = Slicing.kElement, Slicing.kTensor
SHARDS = [(2, CUT, 2, CUT), (1, CUT, 3, CUT), (3, CUT, 1, CUT)]
ADAM = (torch.optim.Adam, {}, Net)


@pytest.mark.parametrize(
    ("made", "layout"),
    [
        *zip(((*each, Net) for each in OPTIMIZERS.values()), cycle(SHARDS), strict=False),
        (ADAM, SHARDS[1]),
        (ADAM, SHARDS[2]),
        # Tensors that are kept whole, also with state of another shape than their own.
        (ADAM, (3, CUT, 2, WHOLE)),
        (ADAM, (3, WHOLE, 2, CUT)),
        (ADAM, (3, WHOLE, 2, WHOLE)),
        ((torch.optim.Adafactor, {}, Matrices), (2, WHOLE, 1, WHOLE)),
    ],
)
def test_training_goes_on_bit_for_bit_whatever_the_servers(files, made, layout):
    (make, settings, net), (before, cut, after, cut_after) = made, layout
    undisturbed = Vault(make, 1, cut_after, net, **settings).train(7)
    path = Vault(make, before, cut, net, **settings).train(4).write(files, 1)
    fresh = resume(Vault(make, after, cut_after, net, **settings), Manifest.open(path))
    fresh.step = 4
    assert equal(fresh.train(3).values(), undisturbed.values())


def test_plain_pytorch_loads_the_files(files):
    vault = Vault(torch.optim.Adam, 3).train(3)
    path = vault.write(files, 1)
    values, state = load_file(path / MODEL), load_file(path / STATE)
    with safe_open(path / MODEL, "pt") as file:
        assert json.loads(file.metadata()["tied"]) == {"tied": ["head.weight"]}
    net = Net()
    net.load_state_dict(values, strict=False)
    for name, tensor in net.named_parameters():
        assert torch.equal(tensor.detach().as_strided((tensor.numel(),), (1,)), vault.values()[name]), name
    assert state["conv.weight/exp_avg"].shape == (6, 5, 3, 3)
    assert not any(name.startswith("idle/") for name in state)
    assert state.keys() == Manifest.open(path).files[STATE].entries.keys()
    assert load_file(path / WORKERS)["worker 0/0"].tolist() == list(range(50))
    assert read(Manifest.open(path))["worker (0, 0)"].tolist() == list(range(50))


def test_facts_and_what_workers_left_come_back(files):
    places = [Address(Role.WORKER, g, i) for g in (0, 1) for i in (0, 2)]
    left = {who: torch.randint(0, 255, (97 * who.group + who.index,), dtype=torch.uint8) for who in places}
    facts = {"first_epoch": None, "epochs": [[3, [[0, 4], [4, 5], [9, 11]]]], "steps": [[0, 6], [1, 8]]}
    manifest = Manifest.open(Vault().train(2).write(files, 12, left, **facts))
    manifest.verify()
    assert (manifest.number, manifest.version, manifest.first_epoch, manifest.clocks) == (12, 2, None, {0: 3})
    assert (manifest.runs(3), manifest.runs(4), manifest.epochs) == (((0, 5), (9, 11)), (), (3,))
    assert [manifest.steps(group) for group in (0, 1, 2)] == [6, 8, 7]
    assert list(manifest.workers) == [(0, 0), (0, 2), (1, 0), (1, 2)]
    for worker, data in left.items():
        assert manifest.worker(worker.group, worker.index) == bytes(data.tolist())
    assert manifest.worker(3, 3) is None


# --- which one counts --------------------------------------------------------------------------------------------


def test_the_one_that_the_job_went_on_from_stays_for_a_group_that_starts_again_alone(files, tmp_path):
    vault = Vault()
    origin = vault.train(1).write(files, 1)
    vault.train(1).write(files, 2)
    assert files.begin(origin, again=True) == 3
    for number in range(3, 6):
        vault.train(1).write(files, number)
    assert numbers(files.folder, whole=False) == [1, 4, 5]
    assert files.begin(files.folder / "000005", again=True) == 6
    vault.train(1).write(files, 6)
    assert numbers(files.folder, whole=False) == [5, 6]


def test_those_that_were_asked_for_by_step_are_all_kept_under_that_name(files, tmp_path):
    vault = Vault()
    for number in range(1, 7):
        vault.train(1).write(files, number, step=10 * number if number % 2 else None)
    assert numbers(files.folder, whole=False) == [1, 3, 5, 6]
    assert sorted(path.name for path in files.folder.glob("step-*")) == ["step-10", "step-30", "step-50"]
    assert [Manifest.open(files.folder / f"step-{step}").number for step in (10, 30, 50)] == [1, 3, 5]
    (files.folder / "step-10").unlink()  # as a user does who needs it no more
    vault.train(1).write(files, 7, step=30)  # done again, by a job that went back
    assert numbers(files.folder, whole=False) == [5, 6, 7]
    assert Manifest.open(files.folder / "step-30").number == 7


def test_what_was_taken_after_the_one_that_is_gone_back_to_is_moved_aside(files, tmp_path):
    """A plain start keeps what was asked for by its step, too."""
    vault, said = Vault(), TextList()
    for number in range(1, 5):
        path = vault.train(1).write(files, number, step=number)
    origin = path.with_name("000002")
    assert files.begin(origin, again=False, notifier=said) == 5
    assert "the snapshots after 2 (000003 to 000004)" in said[0]
    assert numbers(files.folder) == [1, 2] and numbers(tmp_path / ASIDE) == [3, 4]
    assert sorted(path.name for path in files.folder.glob("step-*")) == ["step-1", "step-2"]
    assert latest(tmp_path).number == 2
    assert files.begin(origin, again=True) == 3
    assert numbers(tmp_path / ASIDE) == [3, 4]
    files.begin(None, again=False)
    assert Manifest.open(tmp_path / ASIDE / "step-4").number == 4
    assert Manifest.open(tmp_path / f"{ASIDE}-2" / "step-1").number == 1


def test_a_folder_without_a_manifest_is_none(files, tmp_path):
    assert latest(tmp_path) is None
    path = Vault().write(files, 1)
    (path / MANIFEST).unlink()
    assert latest(tmp_path) is None
    assert files.begin(None, again=True) == 2


def test_those_of_an_earlier_run_are_moved_aside(files, tmp_path):
    path = Vault().write(files, 7)
    assert files.begin(path, again=False) == 8
    assert files.begin(None, again=True) == 8
    assert files.begin(tmp_path / "elsewhere" / FOLDER / "000003", again=False) == 1
    assert latest(tmp_path) is None and numbers(tmp_path / ASIDE) == [7]


@pytest.mark.journey
def test_a_launcher_finds_them_without_torch(files, tmp_path):
    Vault().train(1).write(files, 3)
    code = (
        "import sys; from topotrain.extensions.checkpointing.checkpoint_reader import latest;"
        "print(latest(sys.argv[1]).number, 'torch' in sys.modules)"
    )
    # Of this model one tensor has to be put in order, which only torch can: take a model without it.
    Vault(net=Matrices).write(files, 4)
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert out.stdout.split() == ["4", "False"], out.stderr


# --- what is refused ---------------------------------------------------------------------------------------------


class Other(Matrices):
    def __init__(self, **more):
        super().__init__()
        for name, tensor in more.items():
            setattr(self, name, tensor)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: Other(a=nn.Linear(20, 11, bias=False)), ["a.weight", "(11, 20)", "(10, 20)"]),
        (lambda: Other(a=nn.Linear(20, 10, bias=False, dtype=torch.float64)), ["a.weight", "float64", "float32"]),
        (lambda: Other(c=nn.Linear(2, 2)), ["c.weight", "snapshot 1", "a.weight, b.weight"]),
        (lambda: nn.Sequential(nn.Linear(20, 10, bias=False)), ["0.weight"]),
    ],
)
def test_another_model_is_refused_with_both_values(files, other, words):
    manifest = Manifest.open(Vault(net=Matrices).write(files, 1))
    with pytest.raises(ConfigError) as caught:
        resume(Vault(net=other), manifest)
    assert all(word in str(caught.value) for word in words), caught.value


def test_another_optimizer_is_refused_and_other_settings_are_not(files):
    manifest = Manifest.open(Vault(torch.optim.Adam, net=Matrices).train(1).write(files, 1))
    with pytest.raises(ConfigError, match=r"torch.optim.SGD.*must be torch.optim.Adam"):
        resume(Vault(torch.optim.SGD, net=Matrices), manifest)
    resume(Vault(torch.optim.Adam, net=Matrices, eps=1e-3), manifest)


def forged(path, change):
    """A manifest whose hash is right and whose data is not."""
    data = json.loads((path / MANIFEST).read_text())
    del data["sha256"]
    change(data)
    (path / MANIFEST).write_text(json.dumps({**data, "sha256": hashed(data)}))


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["files"][MODEL]["ranges"].pop(),
        lambda d: d["files"][MODEL]["ranges"].append(d["files"][MODEL]["ranges"][0]),
        lambda d: d["files"][MODEL]["ranges"][0].__setitem__(0, 0),
        lambda d: d["files"][STATE].__setitem__("scattered", []),
        lambda d: d["files"][STATE]["scattered"][0].__setitem__(2, 4),
        lambda d: d["files"][MODEL]["scattered"].append(["head.weight", 0, 4, 0]),
        lambda d: d["workers"][0].__setitem__(2, 1 << 60),
        lambda d: d["workers"].append([0, 0, 1]),
        lambda d: d["optimizer"].append(d["optimizer"][0]),
        lambda d: d.__setitem__("model", d["model"].replace("[6,5,3,3]", "[6,5,3,30000000]")),
        lambda d: d.__setitem__("model", d["model"].replace("[45,1,15,5]", "[45,9,15,5]")),
        lambda d: d.__setitem__("model", "[[[[[[[["),
        lambda d: d.__setitem__("model", "null"),
        lambda d: d.__setitem__("epochs", [[0, [[1, "x"]]]]),
        lambda d: d.__setitem__("clocks", 3),
        lambda d: d.__setitem__("files", {}),
        lambda d: d.__setitem__("number", None),
        lambda d: d.__setitem__("format", 3),
        lambda d: d.clear(),
    ],
)
def test_a_forged_manifest_is_a_named_error(files, tmp_path, change):
    path = Vault(torch.optim.Adam).train(1).write(files, 1)
    forged(path, change)
    with pytest.raises(ConfigError, match="no snapshot in it can be read: 000001"):
        latest(tmp_path)


# --- what earlier runs have left -----------------------------------------------------------------------------------


def test_plain_starts_remove_nothing_that_was_kept_by_its_step_and_say_what_they_move(files, tmp_path):
    said = TextList()
    for run in range(4):  # the first and the third keep a snapshot by its step
        assert files.begin(None, again=False, notifier=said) == 1
        vault = Vault().train(1)
        for number in (1, 2):
            vault.write(files, number, step=100 + run if number == 1 and run % 2 == 0 else None)
    kept = {path.name: str(path.parent.name) for path in tmp_path.glob("manifests*/step-*")}
    assert kept == {"step-100": ASIDE, "step-102": f"{ASIDE}-2"}
    assert all(Manifest.open(tmp_path / folder / link).number == 1 for link, folder in kept.items())
    moved = [text for text in said if "of the earlier run (000001 to 000002)" in text]
    removed = [text for text in said if "are removed" in text]
    assert [text.partition(ASIDE)[2][:2] for text in moved] == [" f", "-2", "-2"]
    assert len(removed) == 1 and f"{ASIDE}-2" in removed[0]


def test_a_snapshot_that_was_moved_aside_can_be_gone_on_from(files, tmp_path):
    Vault().train(1).write(files, 1)
    files.begin(None, again=False)
    Vault().train(2).write(files, 1)
    origin = tmp_path / ASIDE / "000001"
    files.begin(origin, again=False)
    Manifest.open(origin).verify()
    assert numbers(tmp_path / f"{ASIDE}-2") == [1]


# --- files that are none -------------------------------------------------------------------------------------------


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize(
    ("name", "make", "kind"),
    [
        (MANIFEST, os.mkfifo, "is a named pipe, must be a file"),
        (MODEL, os.mkfifo, "is a named pipe, must be a file"),
        (MANIFEST, os.mkdir, "is a folder, must be a file"),
        (MODEL, lambda path: path.symlink_to("/dev/zero"), "is a device, must be a file"),
        (MANIFEST, bind, "is a socket, must be a file"),
    ],
)
def test_a_file_that_is_none_is_refused_and_not_waited_for(files, tmp_path, monkeypatch, name, make, kind):
    path = Vault().train(1).write(files, 1)
    (path / name).unlink()
    monkeypatch.chdir(path)  # the path of a socket is short
    make(Path(name))
    with ended_after(20), pytest.raises(ConfigError, match=f"no readable {name} .*{kind}"):
        latest(tmp_path)


def test_the_tensors_of_a_file_stand_at_aligned_places():
    for name in ("w" * n for n in range(1, 18)):
        layout = lay_out([TensorDescription(name, "complex128", (3,), (1,))], {})
        assert len(layout.header) % 64 == layout.entries[name].begin % 64 == 0
