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
from benchmarks.harness import ROUNDS, Figure, Row, Samples, absent, interleave, row
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
INSTALL_S, RUN_S = 300, 180
PIP = ("--quiet", "--disable-pip-version-check", "--only-binary", ":all:", "--retries", "2", "--timeout", "20")
BOUND, BOUND_TF = ">= 0.90", ">= 1.5"
NOTHING = Figure(0.0, 0.0, 0.0)


def conf(mode: str) -> str:
    return cluster(workers=1, groups=2, top=MODES[mode])


def measure_model(model: str, rounds: int, steps: int) -> tuple[list[Row], Figure]:
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
        turns = {name: lambda side=side: side.turn(steps) for name, side in living.items()}
        found = interleave(turns, rounds, lambda name: living[name].run(1))
    return _rows(model, samples, found, missing)


def _rows(
    model: str, samples: int, found: Mapping[str, Samples], missing: Mapping[str, str]
) -> tuple[list[Row], Figure]:
    what = f"{model.upper()}: samples per second"
    there = [mode for mode in MODES if mode in found]
    best = min(there, key=lambda mode: found[mode].median) if there else ""
    rate = Figure(2 * samples / found["two"].median, *_rates(samples, found["two"]))
    independent = row("", f"{model.upper()}: two independent processes", rate, "samples/s")
    rows = [independent.costing(found["two"], models.megabytes(model))]
    for mode in MODES:
        if mode in missing:
            rows.append(absent("", what, "× independent", missing[mode], "", mode))
            continue
        ratio = found["two"].over(found[mode])  # as many samples in each turn, so rates are as times upside down
        note = "the fastest legal mode" if mode == best else ""
        line = row("P6", what, ratio, "× independent", BOUND if mode == best else "", note, mode)
        rows.append(line.costing(found[mode], models.megabytes(model)))
    if not best:
        return [*rows, absent("P6", what, "× independent", "no mode works", BOUND)], NOTHING
    return rows, found["one"].over(found[best]).times(2)


def _rates(samples: int, times: Samples) -> tuple[float, float]:
    return 2 * samples / max(times.values), 2 * samples / min(times.values)


# --- TensorFlow ------------------------------------------------------------------------------------------------------


def tensorflow(wanted: bool, ours: Figure) -> Row:
    """Our multiple of one process over TensorFlow's; `ours` is the MLP's."""
    what, unit = "MLP: Downpour over ParameterServerStrategy, each over its own single process", "×"
    if not wanted:
        return absent("P6", what, unit, 'not asked for: make bench ARGS="p6 --tensorflow"', BOUND_TF)
    if not ours.value:
        return absent("P6", what, unit, "there is no figure of topotrain's to compare with", BOUND_TF)
    with tempfile.TemporaryDirectory(prefix="bench-tf-") as folder:
        try:
            theirs, version = _tensorflow(Path(folder))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            return absent("P6", what, unit, f"TensorFlow could not be run: {_reason(error)}", BOUND_TF)
    note = f"ours {ours.value:.2f} × one process; TensorFlow {version} {theirs.value:.2f} × its own"
    return row("P6", what, compared(ours, theirs), unit, BOUND_TF, note)


def compared(ours: Figure, theirs: Figure) -> Figure:
    """The ratio of two multiples of different runs; low and high are the furthest that their rounds allow."""
    return Figure(ours.value / theirs.value, ours.low / theirs.high, ours.high / theirs.low)


def _tensorflow(folder: Path) -> tuple[Figure, str]:
    """How many of its own single processes TensorFlow's two workers are worth, and its version."""
    say(f"  installing TensorFlow in a temporary folder (1.6 GB, at most {INSTALL_S / 60:g} minutes)")
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv" / "bin" / "python")
    _call("pip", [python, "-m", "pip", "install", *PIP, "tensorflow-cpu"], INSTALL_S)
    say(f"  TensorFlow with 2 workers and alone, at most {RUN_S / 60:g} minutes")
    found = json.loads(_call("its program", [python, str(PROGRAM), "--rounds", str(ROUNDS)], RUN_S).splitlines()[-1])
    return Samples(tuple(found["alone"])).over(Samples(tuple(found["together"]))), found["version"]


def _call(what: str, command: Sequence[str], limit_s: float) -> str:
    """What a command prints. Raises OSError, CalledProcessError, and ValueError if it does not end in time."""
    env = {key: value for key, value in environment().items() if key != "PYTHONPATH"}
    # gRPC would ask a proxy for addresses of this host, too, and wait for ever.
    env |= {"no_grpc_proxy": "127.0.0.1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit_s, check=True)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{what} did not end within {limit_s:g} s") from None
    return done.stdout


def _reason(error: Exception) -> str:
    """One line: what pip calls an error, else the last thing said."""
    lines = [line.strip() for line in str(getattr(error, "stderr", "") or error).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("ERROR:")] or lines or ["no word"]
    return told[-1]


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensorflow", action="store_true", help="also install and run TensorFlow")
    parser.add_argument("--models", nargs="*", default=list(models.TRAINED), choices=models.TRAINED)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=0, help="per turn; 0: about half a second's")


def measure(options: argparse.Namespace) -> Sequence[Row]:
    rows: list[Row] = []
    gains = {"mlp": NOTHING}
    for model in options.models:
        say(f"  {model}")
        more, gains[model] = measure_model(
            model, options.rounds, options.steps or {"mlp": 8, "gpt": 3, "cnn": 5}[model]
        )
        rows += more
    return [*rows, tensorflow(options.tensorflow, gains["mlp"])]


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare)
