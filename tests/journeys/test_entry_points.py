"""One model, the same batches, two workers: every synchronous entry point ends with the same parameters.

Which bits: `tt.prepare` on servers of ours adds up a group's gradients in one order and updates with one kernel,
wherever the servers are and however the processes were started (the Sandblaster and AllReduce layouts, Paddle's,
TensorFlow's, tools that start units, `tt.Trainer`). Up to rounding: a KVStore scales before it adds and updates rows
with kernels of its own, `Parallelize` adds with Gloo, and the plain script adds within the whole batch.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from free_ports import free_ports
from job_runner import PROGRAMS, JobRunner
from programs import entry_points
from safetensors.torch import load_file
from shells import ended, open_shells

pytestmark = pytest.mark.journey

PROGRAM = str(PROGRAMS / "entry_points.py")
CLOSE = 1e-6  # of a tensor's norm

APART = "nworkers_per_group: 2 nservers_per_group: 2 server_worker_separate: true"
BESIDE = "nworkers_per_group: 2 nservers_per_group: 2"

Values = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("entry_points")


@pytest.fixture(scope="module")
def here(at: Path, served_at: str, warm_at: str) -> JobRunner:
    return JobRunner(at, served_at, warm_at)


@pytest.fixture(scope="module")
def by_hand(at: Path, warm_at: str) -> Callable[[str], Values]:
    """The result of an entry point whose processes are started by hand: each goes through all of these."""
    ports = [str(port) for port in free_ports(5)]
    with open_shells(at, warm_at) as shells:
        for who in ("1", "servers", "0"):
            shells.python(PROGRAM, "--hand", who, "--ports", *ports)
        ended(shells.all, [0, 0, 0])
    return lambda entry_point: load_file(at / entry_point / "final.safetensors")


@pytest.fixture(scope="module")
def expected(here: JobRunner) -> Values:
    """The result of `topotrain run` as Sandblaster."""
    return here.run(APART, "entry_points.py", "prepare", name="expected").final


def the_same_bits(found: Values, expected: Values) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def close(found: Values, expected: Values) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.linalg.vector_norm(found[name] - value) <= CLOSE * torch.linalg.vector_norm(value), name


# --- bits --------------------------------------------------------------------------------------------------------


def test_layouts_and_transports(here: JobRunner, expected: Values) -> None:
    the_same_bits(
        here.run(f"{BESIDE} algorithm: kNaive transport: kTcp", "entry_points.py", "prepare", name="layout").final,
        expected,
    )


def test_units_that_a_tool_starts(at: Path, served_at: str, warm_at: str, expected: Values) -> None:
    """With the variables of torchrun; its real processes, and those of others, are in test_launchers.py."""
    (at / "units.conf").write_text(f'name: "units" cluster {{ {BESIDE} workspace: "units" }}\n')
    words = ["-m", "topotrain", "unit", "units.conf", PROGRAM, "prepare"]
    variables = {"TOPOTRAIN_RENDEZVOUS": f"file://{at}/meet", "TOPOTRAIN_FORKSERVER": served_at, "WORLD_SIZE": "2"}
    with open_shells(at, warm_at) as shells:
        for rank in (1, 0):
            shells.environ |= {**variables, "RANK": str(rank)}
            shells.python(*words)
        ended(shells.all, [0, 0])
    the_same_bits(load_file(at / "units" / "final.safetensors"), expected)


def test_trainer(here: JobRunner, expected: Values) -> None:
    the_same_bits(
        here.run(APART, "entry_points.py", "trainer", extra=entry_points.CONF, name="trainer").final, expected
    )


@pytest.mark.parametrize("entry_point", ["paddle", "tensorflow"])
def test_entry_points_by_hand(by_hand: Callable[[str], Values], expected: Values, entry_point: str) -> None:
    the_same_bits(by_hand(entry_point), expected)


# --- up to rounding ----------------------------------------------------------------------------------------------


def test_key_value_store(here: JobRunner, expected: Values) -> None:
    here.run(APART, "entry_points.py", "kvstore", name="kv")
    close(load_file(here.folder / "kvstore.safetensors"), expected)


def test_parallelize(by_hand: Callable[[str], Values], expected: Values) -> None:
    close(by_hand("parallelize"), expected)


def test_gloo(here: JobRunner, expected: Values) -> None:
    close(here.run(f"{BESIDE} engine: kGloo", "entry_points.py", "prepare", name="gloo").final, expected)


def test_the_plain_script(expected: Values) -> None:
    close(dict(entry_points.loop(*entry_points.build()).named_parameters()), expected)


def test_training_changes_what_is_compared(expected: Values) -> None:
    """Else all of the above would pass with an entry point that does nothing."""
    for name, value in entry_points.build()[0].state_dict().items():
        assert torch.linalg.vector_norm(expected[name] - value) > 0.05 * torch.linalg.vector_norm(value), name
