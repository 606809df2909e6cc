"""A probe survives its file, and a file that is none is refused in one line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from topotrain.config.job import ConfigError
from topotrain.tools.probe.probe_file import (
    Machine,
    Probe,
    ProbedBatch,
    ProbedKernels,
    ProbedOptimizer,
    ProbedParameter,
    ProbedTransport,
    load_probe,
)

TRANSPORT = ProbedTransport(1e-5, 1e-9, 2e-5, 2e-9, 3e-5)
PROBE = Probe(
    version=1,
    machine=Machine("a processor", 2, 1 << 33),
    versions={"topotrain": "0", "torch": "2", "python": "3"},
    program="train.py",
    model=(
        ProbedParameter("weight", (3, 4), "float32", True, 1.0),
        ProbedParameter("bias", (3,), "float32", True, 0.5),
        ProbedParameter("scale", (), "float32", False, 1.0),
    ),
    batch=ProbedBatch(32, 0.01, 0.02, 0.001, 0.002, 0.006, 0.00075, 50),
    spread=0.05,
    optimizer=ProbedOptimizer("SGD", 1.0, 1e-5, 1e-9, 0.9),
    kernels=ProbedKernels(1e-6, 1e-10, 2e-10),
    transports={"shm": TRANSPORT, "tcp": TRANSPORT},
    worker_step_s=2e-4,
    server_message_s=5e-5,
    sharing={2: 1.1, 4: 2.2},
    start_s=3.0,
)


def test_a_probe_is_the_same_after_its_file(tmp_path: Path) -> None:
    file = tmp_path / "probe.json"
    file.write_text(PROBE.to_json())
    assert load_probe(file) == PROBE
    # Files of earlier versions have fields that nothing reads.
    file.write_text(changed(made_at=1e9, digest="0" * 64))
    assert load_probe(file) == PROBE
    assert [p.count for p in PROBE.schema()] == [12, 3, 1]
    assert PROBE.schema()[0].stride == (4, 1)


def test_a_line_through_two_sizes_gives_the_time_of_others() -> None:
    assert PROBE.batch.compute_s(32) == pytest.approx(0.03)
    assert PROBE.batch.compute_s(8) == pytest.approx(0.012)
    # With one size only, all of it grows with the samples.
    assert replace(PROBE.batch, per_sample_s=0.0).compute_s(8) == pytest.approx(0.03 / 4)


def test_a_probe_of_another_model_is_refused() -> None:
    PROBE.check_model(PROBE.schema(), "train.py")
    other = [replace(p, shape=(4, 4), stride=(4, 1)) if p.name == "weight" else p for p in PROBE.schema()]
    with pytest.raises(ConfigError, match=r"a probe of another model.*topotrain probe other\.py"):
        PROBE.check_model(other, "other.py")


def changed(**changes: object) -> str:
    return json.dumps({**json.loads(PROBE.to_json()), **changes})


def within(block: str, **changes: object) -> str:
    """The text of a probe with other fields in a block."""
    return changed(**{block: {**json.loads(PROBE.to_json())[block], **changes}})


def with_first(**changes: object) -> str:
    """The text of a probe with another first parameter."""
    first, *rest = json.loads(PROBE.to_json())["model"]
    return json.dumps({**json.loads(PROBE.to_json()), "model": [{**first, **changes}, *rest]})


def without(block: str, field: str) -> str:
    data = json.loads(PROBE.to_json())
    del (data[block] if block else data)[field]
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no probe"),
        ("[]", "is no probe"),
        ('{"a": 1}', "is no probe"),
        ("[" * 100_000, "is no probe"),
        (changed(version=2), "version = 2: must be 1"),
        (without("", "spread"), "spread: is missing"),
        (without("batch", "size"), "batch.size: is missing"),
        (without("transports", "tcp"), "transports.tcp: is missing"),
        (changed(spread=-1), "spread = -1: must be a number, 0 to 10"),
        (changed(spread=float("nan")), "spread = nan: must be a number"),
        (changed(spread="1"), "spread = '1': must be a number"),
        (changed(sharing={"two": 1.0}), "sharing = 'two': must be numbers of processes"),
        (changed(model=[]), "model: must have a parameter that is trainable"),
        (changed(model=[{**json.loads(PROBE.to_json())["model"][0], "dtype": "text"}]), r"model\[0\].dtype = 'text'"),
        (changed(machine=3), "machine: must be a block"),
        (changed(batch={**json.loads(PROBE.to_json())["batch"], "size": 0}), "batch.size = 0: must be"),
        (within("batch", forward_s=0, backward_s=0), r"batch.forward_s = 0.0: must be above 0, alone or with batch"),
        (within("batch", forward_s=1e300), r"batch.forward_s = 1e\+300: must be a number of seconds, 0 to 86,400"),
        (within("batch", forward_s=10**400), "batch.forward_s = 1000.*: must be a number of seconds, 0 to 86,400"),
        (within("batch", size=1e30), r"batch.size = 1e\+30: must be a whole number"),
        (within("batch", size=10**30), "batch.size = 1000.*: must be a whole number"),
        (within("batch", size=2**40), "batch.size = 1099511627776: must be a whole number, 1 to 1000000000"),
        (within("machine", cores=10**9), "machine.cores = 1000000000: must be a whole number, 1 to 65536"),
        (within("kernels", byte_s=1), "kernels.byte_s = 1: must be a number of seconds, 0 to 0.001"),
        (within("optimizer", momentum=2), "optimizer.momentum = 2: must be a number, 0 to 1"),
        (changed(sharing={"2": 0}), "sharing.2 = 0: must be a number, 1 to 1,000"),
        (changed(sharing={"2": 1.0, "02": 2.0}), "sharing = '02': must be numbers of processes"),
        (changed(sharing={"9" * 5000: 2.0}), "must be numbers of processes"),
        (changed(spread=100), "spread = 100: must be a number, 0 to 10"),
        (with_first(name="bias"), r"model\[1\].name = 'bias': must not be given twice"),
        (with_first(dtype="bool"), r"model\[0\].dtype = 'bool': must be one of .*float32.* that is trainable"),
        (with_first(shape=[10**9, 1000]), r"model\[0\].shape = .*: must leave the model at most 137,438,953,472"),
        (with_first(ready=9.0), r"model\[0\].ready = 9.0: must be a number, 0 to 1"),
        (
            changed(model=[{**each, "trainable": False} for each in json.loads(PROBE.to_json())["model"]]),
            "model: must have a parameter that is trainable",
        ),
    ],
)
def test_a_wrong_file_is_named_with_its_field(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "some.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as refused:
        load_probe(file)
    assert str(refused.value).startswith(str(file))
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_probe(tmp_path / "none.json")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text"):
        load_probe(tmp_path / "bytes")
