"""P6: samples per second of Downpour with two groups, beside two processes that never hear of each other.

With --tensorflow also TensorFlow's ParameterServerStrategy (2 workers, 1 server, the same MLP), in an environment of
its own that is made in a temporary folder: each system as a multiple of its own single process.
"""

import argparse
import json
import subprocess
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import models
from benchmarks.harness import Figure, Row, Samples, absent, interleave, row
from benchmarks.record import run_table, say
from benchmarks.sides import Side, Sides, attempt, cluster, environment, refusal

NAME, TITLE, GOALS = "downpour", "Downpour, 2 groups on one host", ("P6",)

MODES: Mapping[str, str] = {
    "kVisible, kAtStep": "",
    "kHidden, kOnArrival": "grads: kHidden apply: kOnArrival",
    "kHidden, kOnArrival, kLazy": "grads: kHidden apply: kOnArrival pull: kLazy",
}
"""With one worker per group nobody waits for a mean, so kHidden alone is no other way."""
PROGRAM = Path(__file__).parent / "programs" / "tensorflow_ps.py"
INSTALL_S, RUN_S = 600, 300
BOUND, BOUND_TF = ">= 0.90", ">= 1.5"


def conf(mode: str) -> str:
    return cluster(workers=1, groups=2, top=MODES[mode])


def measure_model(model: str, rounds: int, steps: int) -> tuple[list[Row], float]:
    """Rows of one model, and what two groups bring over one process (the fastest mode; 0 if none works)."""
    with Sides() as sides:
        living = {
            "one": sides.peer(f"{model} one", "alone", 1, model),
            "two": sides.peer(f"{model} two", "alone", 2, model),
        }
        missing: dict[str, str] = {}
        for mode in MODES:
            side = attempt(sides.job, f"{model} {mode}", conf(mode), 2, model)
            if isinstance(side, Side):
                living[mode] = side
            else:
                missing[mode] = f"not there yet ({side})" if refusal(conf(mode)) else side
                say(f"  {model}, {mode}: {side}")
        samples = living["one"].hellos[0]["samples"]
        turns = {name: lambda side=side: side.run(steps) for name, side in living.items()}
        found = interleave(turns, rounds, lambda name: living[name].run(1))
    return _rows(model, samples, found, missing)


def _rows(
    model: str, samples: int, found: Mapping[str, Samples], missing: Mapping[str, str]
) -> tuple[list[Row], float]:
    what = f"{model.upper()}: samples per second"
    there = [mode for mode in MODES if mode in found]
    best = min(there, key=lambda mode: found[mode].median) if there else ""
    rate = Figure(2 * samples / found["two"].median, *_rates(samples, found["two"]))
    rows = [row("", f"{model.upper()}: two independent processes", rate, "samples/s")]
    for mode in MODES:
        if mode in missing:
            rows.append(absent("", what, "× independent", missing[mode], "", mode))
            continue
        ratio = found["two"].over(found[mode])  # as many samples in each turn, so rates are as times upside down
        note = "the fastest legal mode" if mode == best else ""
        rows.append(row("P6", what, ratio, "× independent", BOUND if mode == best else "", note, mode))
    if not best:
        return [*rows, absent("P6", what, "× independent", "no mode works", BOUND)], 0.0
    return rows, 2 * found["one"].median / found[best].median


def _rates(samples: int, times: Samples) -> tuple[float, float]:
    return 2 * samples / max(times.values), 2 * samples / min(times.values)


# --- TensorFlow ------------------------------------------------------------------------------------------------------


def tensorflow(wanted: bool, ours: float) -> Row:
    """Our multiple of one process over TensorFlow's; `ours` is the MLP's."""
    what, unit = "MLP: Downpour over ParameterServerStrategy, each over its own single process", "×"
    if not wanted:
        return absent("P6", what, unit, 'not asked for: make bench ARGS="p6 --tensorflow"', BOUND_TF)
    with tempfile.TemporaryDirectory(prefix="bench-tf-") as folder:
        try:
            theirs = _tensorflow(Path(folder))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            detail = getattr(error, "stderr", "") or str(error)
            lines = [line for line in str(detail).splitlines() if line.strip()] or ["no word"]
            return absent("P6", what, unit, f"TensorFlow could not be run: {lines[-1].strip()}", BOUND_TF)
    note = f"ours {ours:.2f} × one process; TensorFlow {theirs['version']} {theirs['multiple']:.2f} × its own"
    return row("P6", what, ours / theirs["multiple"], unit, BOUND_TF, note)


def _tensorflow(folder: Path) -> dict[str, float]:
    say("  installing TensorFlow in a temporary folder")
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv" / "bin" / "python")
    _call([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "tensorflow-cpu"], INSTALL_S)
    return dict(json.loads(_call([python, str(PROGRAM)], RUN_S).splitlines()[-1]))


def _call(command: Sequence[str], limit_s: float) -> str:
    env = {key: value for key, value in environment().items() if key != "PYTHONPATH"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit_s, check=True)
    return done.stdout


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensorflow", action="store_true", help="also install and run TensorFlow")
    parser.add_argument("--models", nargs="*", default=list(models.TRAINED), choices=models.TRAINED)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=0, help="per turn; 0: about half a second's")


def measure(options: argparse.Namespace) -> Sequence[Row]:
    rows: list[Row] = []
    gains = {"mlp": 0.0}
    for model in options.models:
        say(f"  {model}")
        more, gains[model] = measure_model(
            model, options.rounds, options.steps or {"mlp": 8, "gpt": 3, "cnn": 5}[model]
        )
        rows += more
    return [*rows, tensorflow(options.tensorflow, gains["mlp"])]


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare)
