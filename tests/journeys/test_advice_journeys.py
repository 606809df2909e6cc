"""Advice with real jobs: a job that chooses its layout, and layouts that are tried."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from arithmetic_predictor import timed_probe
from job_runner import PROGRAMS
from launch_targets import MARK, marked, wait_for
from safetensors.torch import load_file
from seeds import soak_only
from shells import Shell, Shells, ended

from topotrain.tools.probe.probe_file import ProbedParameter

pytestmark = pytest.mark.journey

STEADY = str(PROGRAMS / "steady.py")
SLOW = (STEADY, "--step-s", "0.02")  # long enough to be compared


def topotrain(shells: Shells, *words: str) -> Shell:
    return shells.python("-m", "topotrain", *words)


def probe_in(folder: Path) -> str:
    """A probe with the model of the steady program, and times that are made up."""
    shapes = {"0.weight": (32, 16), "0.bias": (32,), "1.weight": (32,), "1.bias": (32,)}
    shapes |= {"4.weight": (4, 32), "4.bias": (4,)}
    model = tuple(ProbedParameter(name, shape, "float32", True, 1.0) for name, shape in shapes.items())
    (folder / "probe.json").write_text(timed_probe(batch=12, model=model).to_json())
    return "probe.json"


def test_a_job_that_chooses_has_the_bits_of_the_block_by_hand(shells: Shells, served_at: str) -> None:
    run = ("run", "--forkserver", served_at, "--set", "checkpoint_freq=20")
    (shells.folder / "auto.conf").write_text('name: "job" cluster { auto: true workspace: "auto" }\n')
    (said,) = ended([topotrain(shells, *run, "auto.conf", *SLOW, "--epochs", "2")], [0])
    found = re.search(r"auto: by hand this is (cluster \{.*\})", said)
    assert found is not None, said
    assert re.search(r"topotrain: auto: .+ samples/s, measured here in at most 3 s; next: ", said), said
    block = found[1].replace("cluster {", 'cluster { workspace: "hand"')
    (shells.folder / "hand.conf").write_text(f'name: "job" {block}\n')
    ended([topotrain(shells, *run, "hand.conf", *SLOW, "--epochs", "2")], [0])
    chosen, by_hand = (load_file(shells.folder / name / "final.safetensors") for name in ("auto", "hand"))
    assert chosen.keys() == by_hand.keys()
    for name, value in chosen.items():
        assert torch.equal(value, by_hand[name]), name
    # What resumes keeps the layout, and measures nothing.
    (said,) = ended([topotrain(shells, *run, "auto.conf", "--set", "resume=true", *SLOW, "--epochs", "3")], [0])
    assert "auto:" not in said and "measuring" not in said


@soak_only
def test_the_best_layouts_are_tried_with_a_probe_of_their_model(shells: Shells) -> None:
    (shells.folder / "other.json").write_text(timed_probe(elements=1000, batch=12).to_json())
    (said,) = ended([topotrain(shells, "advise", "--probe", "other.json", "--try", "1", STEADY)], [2])
    assert "a probe of another model, made with made.py; `topotrain probe " in said and "advised" not in said
    words = ("advise", "--probe", probe_in(shells.folder), "--hosts", "2", "--link", "1gbit,1ms", "--sync")
    more = ("--within", "1s", "--try", "1", "--json", STEADY, "--epochs", "100000")
    (said,) = ended([topotrain(shells, *words, *more)], [0])
    (tried,) = json.loads(said[said.index("{") :])["tried"]
    assert tried["measured"] is not None, tried["note"]
    assert tried["measured"] > 0 < tried["predicted"]


@soak_only
def test_ctrl_c_during_a_trial_leaves_nothing(shells: Shells) -> None:
    shells.environ[MARK] = mark = shells.folder.name
    words = ("advise", "--probe", probe_in(shells.folder), "--sync", "--within", "1s", "--try", "1")
    asked = topotrain(shells, *words, STEADY, "--epochs", "100000")
    # Processes of its job, and not only the command that starts them.
    wait_for(lambda: len(marked(mark)) > 2, 90)
    os.killpg(asked.pid, signal.SIGINT)
    asked.communicate(timeout=300)
    assert asked.returncode == 130
    wait_for(lambda: not marked(mark), 30)
