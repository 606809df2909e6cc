"""A probe survives its file, and a file that is none is refused in one line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_probe import made_probe

from topotrain.config.job import ConfigError
from topotrain.tools.probe.probe_file import ProbedBatch, ProbedParameter, load_probe

PROBE = made_probe(
    batch=32,
    model=(
        ProbedParameter("weight", (3, 4), "float32", True, 1.0),
        ProbedParameter("bias", (3,), "float32", True, 0.5),
        ProbedParameter("scale", (), "float32", False, 1.0),
    ),
    sharing={2: 1.1, 4: 2.2},
)
PROBE = replace(PROBE, batch=ProbedBatch(32, 0.01, 0.02, 0.001, 0.002, 0.006, 0.00075, 50))


def changed(*path: Any, **changes: object) -> str:
    """The text of the probe with other fields in a block of this path; a field that is `...` is left out."""
    data = json.loads(PROBE.to_json())
    block = data
    for name in path:
        block = block[name]
    block |= changes
    for name in [name for name in block if block[name] is ...]:
        del block[name]
    return json.dumps(data)


def test_a_probe_is_the_same_after_its_file(tmp_path: Path) -> None:
    file = tmp_path / "probe.json"
    # Files of earlier versions have fields that nothing reads.
    for text in (PROBE.to_json(), changed(made_at=1e9, digest="0" * 64)):
        file.write_text(text)
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


FIRST = ("model", 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no probe"),
        ("[]", "is no probe"),
        ('{"a": 1}', "is no probe"),
        ("[" * 100_000, "is no probe"),
        (changed(version=2), "version = 2: must be 1"),
        (changed(spread=...), "spread: is missing"),
        (changed("batch", size=...), "batch.size: is missing"),
        (changed("transports", tcp=...), "transports.tcp: is missing"),
        (changed(spread=-1), "spread = -1: must be a number, 0 to 10"),
        (changed(spread=100), "spread = 100: must be a number, 0 to 10"),
        (changed(spread=float("nan")), "spread = nan: must be a number"),
        (changed(spread="1"), "spread = '1': must be a number"),
        (changed(machine=3), "machine: must be a block"),
        (changed(model=[]), "model: must have a parameter that is trainable"),
        (changed(model=json.loads(PROBE.to_json())["model"][2:]), "model: must have a parameter that is trainable"),
        (changed("batch", size=0), "batch.size = 0: must be"),
        (changed("batch", size=1e30), r"batch.size = 1e\+30: must be a whole number"),
        (changed("batch", size=10**30), "batch.size = 1000.*: must be a whole number, 1 to 1000000000"),
        (changed("batch", forward_s=0, backward_s=0), r"batch.forward_s = 0.0: must be above 0, alone or with batch"),
        (changed("batch", forward_s=1e300), r"batch.forward_s = 1e\+300: must be a number of seconds, 0 to 86,400"),
        (changed("batch", forward_s=10**400), "batch.forward_s = 1000.*: must be a number of seconds, 0 to 86,400"),
        (changed("machine", cores=10**9), "machine.cores = 1000000000: must be a whole number, 1 to 65536"),
        (changed("kernels", byte_s=1), "kernels.byte_s = 1: must be a number of seconds, 0 to 0.001"),
        (changed("optimizer", momentum=2), "optimizer.momentum = 2: must be a number, 0 to 1"),
        (changed(sharing={"two": 1.0}), "sharing = 'two': must be numbers of processes"),
        (changed(sharing={"2": 0}), "sharing.2 = 0: must be a number, 1 to 1,000"),
        (changed(sharing={"2": 1.0, "02": 2.0}), "sharing = '02': must be numbers of processes"),
        (changed(sharing={"9" * 5000: 2.0}), "must be numbers of processes"),
        (changed(*FIRST, name="bias"), r"model\[1\].name = 'bias': must not be given twice"),
        (changed(*FIRST, dtype="text"), r"model\[0\].dtype = 'text'"),
        (changed(*FIRST, dtype="bool"), r"model\[0\].dtype = 'bool': must be one of .*float32.* that is trainable"),
        (changed(*FIRST, shape=[10**9, 1000]), r"model\[0\].shape = .*: must leave the model at most 137,438,953,472"),
        (changed(*FIRST, ready=9.0), r"model\[0\].ready = 9.0: must be a number, 0 to 1"),
        (None, "No such file"),
        (b"\xff\xfe\x00", "not text"),
    ],
)
def test_a_wrong_file_is_named_with_its_field(tmp_path: Path, text: str | bytes | None, words: str) -> None:
    file = tmp_path / "some.json"
    if text is not None:
        file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError, match=words) as refused:
        load_probe(file)
    assert str(refused.value).startswith(str(file))
    assert "\n" not in str(refused.value)
