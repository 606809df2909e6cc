"""Runs a script in plain Python and as jobs, and says how each job ended."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import process_pool
import torch
from safetensors.torch import load_file

from tests.differential.scripts import Script

LAYOUTS = {
    "allreduce": "nworkers_per_group: 2 nservers_per_group: 2",
    "sandblaster": "nworkers_per_group: 3 nworkers_per_procs: 3 nservers_per_group: 2 nservers_per_procs: 2"
    " server_worker_separate: true",
    "memory": "nworkers_per_group: 2 nworkers_per_procs: 2 nservers_per_group: 2 nservers_per_procs: 2",
    "tcp": "nworkers_per_group: 2 nservers_per_group: 2 transport: kTcp",
    "island": "nworker_groups: 1 server_worker_separate: true sync_freq: 1"
    " outer { type: kSGD learning_rate { type: kFixed base_lr: 1 } }",
}
"""Clusters of few processes, since a process costs more than the training."""
LIBRARIES = ("transformers.trainer", "accelerate", "pytorch_lightning")
TOLERANCE = 1e-5
SECONDS = 60.0
INTERNAL = re.compile(
    r"^(Assertion|Attribute|Index|Key|Name|Type|Unbound\w*|ZeroDivision|Recursion)\w*|\(\d+, \d+, \d+"
)
PACKAGE = f"{os.sep}topotrain{os.sep}"


@dataclass(frozen=True)
class Outcome:
    """How a job ended: `equal`, `refused`, or what must not be: `different`, `crash`, `hang`."""

    kind: str
    words: str = ""

    @property
    def is_good(self) -> bool:
        return self.kind in ("equal", "refused")

    def __str__(self) -> str:
        return f"{self.kind}: {self.words}" if self.words else self.kind


class InvalidScript(Exception):
    """Plain Python cannot run the script."""


@dataclass(frozen=True)
class Result:
    """What a run left: tensors by name, and numbers by name."""

    tensors: Mapping[str, torch.Tensor]
    values: Mapping[str, Any]

    def differences(self, other: "Result") -> dict[str, float]:
        """By name, the largest difference in relation to the largest value, or to 1."""
        found = {name: _apart(t, other.tensors[name]) for name, t in self.tensors.items() if name in other.tensors}
        missing = self.values.keys() ^ other.values.keys()
        for name, value in self.values.items():
            if name not in missing:
                found[f"value {name}"] = _apart(
                    *(torch.tensor(v, dtype=torch.double) for v in (value, other.values[name]))
                )
        return {**found, **{f"value {name}": float("inf") for name in missing}}


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if not one.numel():
        return 0.0
    one, other = one.double(), other.double()
    far = (one - other).abs()
    far[(one == other) | (one.isnan() & other.isnan())] = 0
    return float((far.nan_to_num(float("inf")) / one.abs().max().nan_to_num(1.0).clamp(min=1.0)).max())


@dataclass(frozen=True)
class Bench:
    """Runs scripts in processes that one warm process forks."""

    warm: process_pool.Warm
    folder: Path

    def outcomes(self, script: Script, layouts: Iterator[str] | list[str]) -> dict[str, Outcome]:
        """The outcome under each layout. Raises InvalidScript."""
        with tempfile.TemporaryDirectory(dir=self.folder) as made:
            place = Path(made)
            program = place / "script.py"
            program.write_text(script.text())
            plain = self._plain(program, place / "plain")
            turned = partial(self._plain, program, place / "turned", TURNED="1")
            return {layout: self._judged(program, layout, plain, turned) for layout in layouts}

    def _plain(self, program: Path, folder: Path, **environ: str) -> Result:
        folder.mkdir()
        where = {"PLAIN": str(folder / "final"), "VALUES": str(folder / "values")}
        code, said = self._run([str(program)], folder, {**where, **environ})
        if code:
            raise InvalidScript(said)
        return _result(folder / "final", folder / "values", None)

    def _judged(self, program: Path, layout: str, plain: Result, turned: "partial[Result]") -> Outcome:
        folder = program.parent / layout
        folder.mkdir()
        conf, report = folder / "job.conf", folder / "report.json"
        conf.write_text(f'name: "{layout}"\ncluster {{ {LAYOUTS[layout]} workspace: "{folder}/ws" }}\n')
        words = ["-m", "topotrain", "run", "--report", str(report), "--forkserver", self.warm.served, str(conf)]
        try:
            code, said = self._run([*words, str(program)], folder, {"VALUES": str(folder / "values")})
        except subprocess.TimeoutExpired as late:
            return Outcome("hang", (late.output or b"").decode(errors="replace")[-300:])
        if code:
            cause = (json.loads(report.read_text()).get("cause") if report.exists() else None) or {}
            return _refusal(cause, said)
        job = _result(folder / "ws" / "final.safetensors", folder / "values", report)
        shutil.rmtree(folder)
        far = {name: value for name, value in plain.differences(job).items() if not value < TOLERANCE}
        if far:  # rounding alone may change a script that amplifies it
            noise = plain.differences(turned())
            shutil.rmtree(program.parent / "turned")
            far = {name: value for name, value in far.items() if not value < TOLERANCE + 30 * noise.get(name, 0.0)}
        worst = sorted(far, key=far.__getitem__, reverse=True)[:4]
        return Outcome("different", ", ".join(f"{n} {far[n]:.1e}" for n in worst)) if far else Outcome("equal")

    def _run(self, words: list[str], folder: Path, environ: dict[str, str]) -> tuple[int, str]:
        process = process_pool.Forked(self.warm.path, words, folder, {**os.environ, "OMP_NUM_THREADS": "1", **environ})
        try:
            said, _ = process.communicate(SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(20)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            raise
        assert process.returncode is not None
        return process.returncode, said


def _result(final: Path, values: Path, report: Path | None) -> Result:
    found = json.loads(values.read_text()) if values.exists() else {}
    tensors = load_file(final)
    found["reported"] = found["size"]
    if report is not None:
        found["reported"] = json.loads(report.read_text())["metrics"]["size"]
    return Result(tensors, found)


def _refusal(cause: Mapping[str, Any], said: str) -> Outcome:
    """A refusal by name, or a crash: an error that tells of the inside."""
    text, trace = str(cause.get("text", "")), str(cause.get("traceback", ""))
    if not text:
        return Outcome("crash", f"no cause: {said[-300:]}")
    files = re.findall(r'File "([^"]*)"', trace)
    foreign = cause.get("kind") != "config" and len(files) > 1 and PACKAGE not in files[-1]
    return Outcome("crash" if INTERNAL.search(text) or foreign else "refused", text)


@contextmanager
def opened(kind: str = "plain") -> Iterator[Bench]:
    """Start the warm process for scripts of a kind (`scripts.SETS`), and end it with all that it forked."""
    preload = ("tests.differential.preload", *(LIBRARIES if kind == "library" else ()))
    with (
        tempfile.TemporaryDirectory(prefix="tt-") as folder,
        closing(process_pool.start(Path(folder) / "warm", preload)) as warm,
    ):
        yield Bench(warm, Path(folder))
