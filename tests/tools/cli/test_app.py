"""The command: what it accepts, what it refuses, what it prints where, and with which exit code it ends."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import typer.main
from reference_tables import with_tables
from seeds import soaked

from topotrain.config.job import ConfigError, Job
from topotrain.config.sharding import Parameter
from topotrain.config.topology import Topology
from topotrain.core.events import Event, Failed, Finished, Incident, Metrics, Output, Started, StepDone
from topotrain.launch import EventListener, JobOutcome
from topotrain.launch.launchers import LAUNCHERS
from topotrain.tools.cli import app
from topotrain.tools.cli.command_line import PRESENT
from topotrain.tools.monitor import job_report
from topotrain.tools.replay.decision_file import DecisionFile

DOCS = Path(__file__).parents[3] / "docs" / "reference.md"
DOWNPOUR = """
cluster {
  nworker_groups: 2
  nworkers_per_group: 2
  nservers_per_group: 2
  server_worker_separate: true
}
"""

PANELS = ["Start", "Look", "Cluster", "Think", "Study"]

Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with down.conf and train.py, in which we stand."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "down.conf").write_text(DOWNPOUR)
    (tmp_path / "train.py").write_text("print('hello')\n")
    return tmp_path


class Launcher:
    """Starts nothing, tells a short story, and remembers what it was asked for."""

    def __init__(self, ending: JobOutcome | None = None) -> None:
        self.ending = ending or JobOutcome(0, 1.5)
        self.jobs: list[Job] = []
        self.profiles: list[int] = []
        self.forkservers = 0

    def __call__(
        self,
        forkserver: str,
        profile: int,
        resume: str = "",
        outlet: object = None,
        shared: object = None,
        watch: object = None,
        folder: object = None,
    ) -> "Launcher":
        self.profiles.append(profile)
        return self

    @contextmanager
    def forkserver(self) -> Iterator[None]:
        """What loads torch for one job."""
        self.forkservers += 1
        yield

    def start(self, job: Job, topology: Topology, on_event: EventListener) -> JobOutcome:
        self.jobs.append(job)
        for event in self.events():
            on_event(event)
        return self.ending

    def events(self) -> Iterator[Event]:
        yield Started("worker 0/0", 77)
        yield Output("worker 0/0", "stdout", "epoch 1\n")
        yield StepDone("worker 0/0", 0.5, 1, 64, 0.25, 0.0, 0, 10, 20)
        yield Finished("worker 0/0", 1, 64, 0.0, 0, 10, 20)
        yield Metrics({"accuracy": 0.96})


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    found = Launcher()
    monkeypatch.setitem(sys.modules, "topotrain.launch.local", SimpleNamespace(LocalLauncher=found))
    monkeypatch.setattr("topotrain.launch.shared_forkserver.for_one_job", found.forkserver)
    return found


# ---- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "program", "given"),
    [
        ("run a.conf", "", {"conf": Path("a.conf")}),
        ("run a.conf t.py", "t.py", {}),
        ("run a.conf t.py --set x=1 -- y", "t.py --set x=1 -- y", {"as_json": False}),
        ("run a.conf t.py -- --epochs 2", "t.py --epochs 2", {}),
        ("run --set x=1 a.conf --report r t.py --json", "t.py --json", {"sets": ["x=1"], "report": Path("r")}),
        ("run a.conf -- t.py --x", "t.py --x", {}),
        ("plan a.conf --json", "", {"as_json": True}),
        ("predict a.conf t.py --probe x", "t.py --probe x", {"probe": None}),
        ("chaos --seed 7 a.conf t.py --seed 1 -- --x", "t.py --seed 1 -- --x", {"seed": 7}),
        ("chaos a.conf -m p.t --seed 1", "-m p.t --seed 1", {"seed": 0}),
        ("probe --out p.json t.py --out x", "t.py --out x", {"out": Path("p.json")}),
        ("advise --hosts 2 -mp.t --hosts 3", "-m p.t --hosts 3", {"hosts": "2"}),
        ("replay --until 4 a.record t.py --until 5", "t.py --until 5", {"until": "4"}),
        ("run --watch a.conf t.py --x", "t.py --x", {"watch_port": 0, "conf": Path("a.conf")}),
        ("run --watch 8080 a.conf t.py", "t.py", {"watch_port": 8080}),
        ("run --watch=8080 a.conf t.py", "t.py", {"watch_port": 8080}),
        ("run a.conf --watch t.py", "t.py", {"watch_port": 0}),
        ("run --resume w --watch", "", {"watch_port": 0, "resume": Path("w")}),
        ("run a.conf t.py --watch", "t.py --watch", {"watch_port": None}),
        ("run a.conf -- t.py --watch", "t.py --watch", {"watch_port": None}),
        ("run a.conf -m p.t --lr 1 -m x", "-m p.t --lr 1 -m x", {}),
        ("run --set x=1 a.conf -mp.t -- --json", "-m p.t --json", {"sets": ["x=1"], "as_json": False}),
        ("launch srun --id a a.conf -m p.t x.py", "-m p.t x.py", {"job_id": "a"}),
        ("unit --rank 0 a.conf -m p.t", "-m p.t", {"rank": 0}),
    ],
)
def test_what_follows_the_program_is_the_programs(argv: str, program: str, given: dict[str, object]) -> None:
    found = parsed(argv.split())
    assert " ".join([found["program"] or "", *(found["args"] or [])]) == program
    assert {key: found[key] for key in given} == given


@pytest.mark.parametrize(
    ("argv", "files", "out"),
    [
        ("a.conf b.yml --out d t.py --lr 1 --out e", ["a.conf", "b.yml", "t.py", "--lr", "1", "--out", "e"], "d"),
        ("a.conf b.yml --out d -m p.t --lr c.conf", ["a.conf", "b.yml", "-m p.t", "--lr", "c.conf"], "d"),
        ("a.conf b.conf", ["a.conf", "b.conf"], "workspace/compare"),
    ],
)
def test_a_comparison_has_any_number_of_job_files(argv: str, files: list[str], out: str) -> None:
    found = commands()["compare"].make_context("compare", argv.split()).params
    assert (found["files"], found["out"]) == (files, Path(out))


def test_options_of_ours_behind_the_script_are_named_and_what_the_script_wants_is_left_alone(
    ask: Ask, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, whatever files of the user say. None of them is read."""
    (here / "train.py").write_text("parser.add_argument('--set --report --json --plot --out --dry-run --seed')")
    for name in ("topotrain.tools.cli.command_line.ProgramCommand", "typer.core.TyperCommand"):
        monkeypatch.setattr(f"{name}.invoke", lambda self, context: None)
    for argv, names, command in (
        ("run down.conf train.py --set seed=7", "--set is", "run"),
        ("run down.conf train.py --lr 1 --report=r.json --json", "--report, --json are", "run"),
        ("plan down.conf train.py --plot a.png", "--plot is", "plan"),
        ("compare down.conf train.py --out d", "--out is", "compare"),
        ("launch srun down.conf train.py --dry-run", "--dry-run is", "launch srun"),
        ("chaos down.conf train.py --seed 7 -- --quiet", "--seed is", "chaos"),
    ):
        given, place = names.rpartition(" ")[::2]
        assert ask(*argv.split()) == (
            0,
            "",
            f"topotrain: {given} behind train.py {place} given to it: options of `topotrain {command}` come before "
            "train.py, and a -- behind it says that this is meant\n",
        )
    for argv in (
        "run --set seed=7 down.conf train.py --epochs 2 --settings a --help",
        "run down.conf train.py -- --set seed=7",
        "run down.conf train.py --plot x",
        "run down.conf train.py --forkserver x",
        "run down.conf -- train.py --set seed=7",
        "jobs list tcp://h:1",
    ):
        assert ask(*argv.split()) == (0, "", "")


def test_the_help_has_panels_and_whole_sentences(ask: Ask) -> None:
    out = "".join(ask(*group, "--help")[1] for group in ((), ("jobs",), ("launch",)))
    shown = [line.split(maxsplit=1)[0] for line in out.split("Start:")[1].splitlines() if line.startswith("  ")]
    panels = ("init", "run", "plan", "compare", "check"), ("watch", "jobs"), ("unit", "store", "doctor", "pserver")
    assert shown[:11] == [name for panel in panels for name in panel]
    assert re.findall(r"^(\w+):$", out, re.M) == ["Options", *PANELS, *("Options", "Commands") * 2]
    assert "..." not in out.replace("[ARGS]...", "") and "leave " not in out.split("Study:")[0]
    for command in (each for found in (commands(), below("jobs"), below("launch")) for each in found.values()):
        if command.hidden:
            continue
        (line,) = re.findall(rf"^  {command.name} +(\S.*)$", out, re.M)
        assert line == command.get_short_help_str(1000), "on one line"


def commands() -> dict[str, typer.core.TyperCommand]:
    """Those that still do something."""
    found = typer.main.get_command(app.app).commands.items()  # type: ignore[attr-defined]
    return {name: command for name, command in found if name not in PRESENT}


def below(group: str) -> dict[str, typer.core.TyperCommand]:
    """Those of a group."""
    return dict(commands()[group].commands)  # type: ignore[attr-defined]


def parsed(words: Sequence[str]) -> dict[str, Any]:
    """The parameters that a command, or one of a group, has read."""
    name, *rest = words
    command = commands()[name]
    if hasattr(command, "commands"):
        name, command, rest = rest[0], command.commands[rest[0]], rest[1:]
    return command.make_context(name, rest).params


def options(command: typer.core.TyperCommand) -> Iterator[str]:
    """Those that the help shows."""
    for parameter in command.params:
        if parameter.param_type_name == "option" and not parameter.hidden:  # type: ignore[attr-defined]
            yield from parameter.opts
    for below in getattr(command, "commands", {}).values():
        yield from options(below)


@pytest.mark.parametrize(
    "name",
    [
        *("run", "plan", "compare", "unit", "chaos", "advise", "predict", "watch", "init", "doctor"),
        *(f"launch {name}" for name in LAUNCHERS),
    ],
)
def test_every_command_helps_with_an_example(ask: Ask, capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, _ = ask(*name.split(), "--help")
    assert code == 0
    example = out[out.index("Example:") :].split("\n")[1].strip()
    assert f"{example} ".startswith(f"topotrain {name} ")
    parsed(example.split()[1:])
    assert capsys.readouterr().err == ""  # nothing of ours went to the script


@pytest.mark.parametrize("shell", soaked(["bash"], ["zsh", "fish"]))
def test_a_shell_is_offered_commands_and_job_files(
    ask: Ask, here: Path, monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: (shell, f"/bin/{shell}"))
    assert f"_TOPOTRAIN_COMPLETE=complete_{shell}" in ask("--show-completion")[1]
    (here / "deep" / "er").mkdir(parents=True)
    (here / "deep" / "er" / "a.yaml").touch()
    (here / "deep" / "er" / "notes.txt").touch()
    DecisionFile(Job(), True, {}).save(here / "day.of.june")
    monkeypatch.setenv("_TOPOTRAIN_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    for line, offered in (
        ("topotrain comp", {"compare"}),
        ("topotrain run d", {"down.conf", "deep/"}),
        ("topotrain launch srun dee", {"deep/er/a.yaml"}),
        ("topotrain unit deep/er/", {"deep/er/a.yaml"}),
        ("topotrain compare down.conf t", {"train.py"}),
        ("topotrain replay d", {"day.of.june", "deep/"}),
    ):
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        out = ask()[1]
        # zsh gets the words in quotation marks; in zsh and fish a command comes with its help.
        quoted = re.findall(r'^(?:.*\(\()?"(.+?)"', out, re.M)
        words = quoted if shell == "zsh" else [each.split("\t")[0] for each in out.split("\n")]
        assert {word for word in words if word} == offered


def test_the_version_and_a_suggestion_for_a_typo(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.2.3")
    assert ask("--version") == (0, "topotrain 1.2.3\n", "")
    code, _, err = ask("plam", "a.conf")
    assert code == 2 and "plan" in err and ask("run", "a.conf", "--repport", "x")[0] == 2
    project = tomllib.loads((DOCS.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"] == {"topotrain": "topotrain.__main__:main"}


# ---- plan ------------------------------------------------------------------------------------------------------------


def test_plan_as_table_and_as_data(ask: Ask, here: Path) -> None:
    code, out, err = ask("plan", "down.conf")
    assert (code, err) == (0, "")
    assert "Downpour" in out
    code, out, err = ask("plan", "down.conf", "--json", "--set", "cluster.nworker_groups=4")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert data["nprocs"] == 10
    assert data["units"][1] == {"rank": 1, "workers": [[0, 1]], "servers": []}
    assert data["server_group_of_worker_group"] == [0, 0, 0, 0]
    (here / "down.conf").write_text('program: "elsewhere.py"\n' + DOWNPOUR)
    assert ask("plan", "down.conf")[0] == 0, "the program need not exist"


def a_look(program: str, args: Sequence[str]) -> SimpleNamespace:
    assert list(args) == ["--wide"]
    parameters = (Parameter("w", (100, 64), (64, 1), "float32", True),)
    return SimpleNamespace(
        model=None,
        loader=None,
        parts=lambda: SimpleNamespace(parameters=parameters),
        state_factor=lambda: 1.0,
        momentum=lambda updater: 0.0,
        optimizer_names=lambda updater: (),
        trained=lambda: None,
    )


def test_plan_with_a_program_adds_slices_and_memory(ask: Ask, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "topotrain.parallel.api.dry_run", SimpleNamespace(look=a_look))
    monkeypatch.setitem(sys.modules, "topotrain.tools.plan.model_cut", SimpleNamespace(cut_of=lambda *_: None))
    code, out, _ = ask("plan", "down.conf", "--json", "train.py", "--wide")
    data = json.loads(out)
    assert code == 0
    assert sum(share["elements"] for share in data["slices"]) == 6400
    assert len(data["memory"]) == 6
    assert "server 0/1" in ask("plan", "down.conf", "train.py", "--wide")[1]


def test_plan_of_a_program_that_raises(ask: Ask, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(program: str, args: Sequence[str]) -> None:
        raise (ZeroDivisionError if args else ConfigError)("optimizer", "LBFGS", "is not element-wise")

    monkeypatch.setitem(sys.modules, "topotrain.parallel.api.dry_run", SimpleNamespace(look=look))
    code, _, err = ask("plan", "down.conf", "train.py", "--wide")
    assert code == 1
    assert "train.py failed" in err
    assert "ZeroDivisionError" in err
    code, _, err = ask("plan", "down.conf", "train.py")
    assert code == 2
    assert "LBFGS" in err
    assert "Traceback" not in err


@pytest.mark.journey
def test_help_and_plan_import_nothing_slow(here: Path) -> None:
    code = """
import sys
from topotrain.tools.cli.app import main
slow = {"torch", "numpy", "rich", "matplotlib", "yaml", "asyncio"}
for words in ("--help", "run --help", "chaos --help", "plan down.conf", "plan down.conf --json"):
    try:
        main(words.split())
    except SystemExit as left:
        assert not left.code, left.code
    more = {"google.protobuf", "topotrain.extensions", "topotrain.config.job_file"} if "--help" in words else set()
    assert not (slow | more) & {*sys.modules}, (words, (slow | more) & {*sys.modules})
"""
    environment = {"PYTHONPATH": str(DOCS.parents[1]), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


# ---- bad input -------------------------------------------------------------------------------------------------------

SEVERAL_UNITS = (
    "launch mpirun",
    "launch kubernetes --image x",
    *(f"unit --rank {rank} --nprocs 2 --rendezvous file:///nowhere" for rank in (0, 1)),
)
REFUSED = (
    *(
        (f"{command} {words} train.py", said)
        for command in ("run", "plan")
        for words, said in (
            ("gone.conf", "gone.conf"),
            ("", "must end in .conf"),
            ("typo.conf", "typo.conf:2:"),
            ("odd.conf", "nworkers_per_procs = 2"),
            ("down.conf --set cluster.link={} --set cluster.replicas=2", "replicas = 2"),
            ("down.conf --set cluster.nope=1", "nope"),
        )
    ),
    ("run down.conf", "no program"),
    ("run down.conf gone.py", "gone.py"),
    ("run down.conf trees", "trees: is a folder"),
    ("run down.conf --report train.py/r.json train.py", "--report"),
    ("run -m trees.train down.conf", "no job file before -m trees.train"),
    ("run --lecture 0.5 down.conf train.py", "--lecture was removed: --watch shows"),
    ("compare down.conf", "no program"),
    ("compare train.py", "no job file"),
    ("compare down.conf notes.txt train.py", "notes.txt"),
    ("compare down.conf gone.conf train.py", "gone.conf"),
    ("compare down.conf gone.py", "gone.py"),
    ("compare --out train.py/x down.conf train.py", "--out"),
    *(
        (f"{command} down.conf train.ipynb", "program train.ipynb: is a notebook, must be a Python script; `jupyter nb")
        for command in ("run", "plan", "compare", "chaos", "launch srun", *SEVERAL_UNITS[1:3])
    ),
    *(
        (
            f"{command} down.conf -m trees.trian",
            "error: program = '-m trees.trian': there is no module trees.trian; did",
        )
        for command in ("run", "plan", "compare", "chaos", "launch srun", "launch local", "unit")
    ),
    *(
        (f"{command} {options} down.conf train.py", said)
        for command in ("run", *SEVERAL_UNITS)
        for options, said in (
            ("--log wandb", "--log = 'wandb': must be tensorboard[:DIR], jsonl[:FILE] or python:MODULE:CLASS"),
            ("--log jsonl --log jsonl", "is given twice"),
            ("--metrics port", "--metrics = 'port': must be PORT or ADDRESS:PORT"),
        )
    ),
    ("run --log tensorboard:a/b --metrics port down.conf train.py", "--metrics"),
    ("run --log jsonl:/dev/null/x down.conf train.py", "--log /dev/null/x: cannot be written"),
    ("run --log tensorboard:/proc/x down.conf train.py", "'tensorboard:/proc/x': must be tensorboard[:DIR] with a fol"),
    ("run --log tensorboard:/dev/null down.conf train.py", "DIR that can be made and written (File exists)"),
    (f"{SEVERAL_UNITS[2]} --log jsonl", "--log = 'jsonl': needs JOB.conf, which unit 0 was started without"),
    ("watch .", "has no recording"),
    ("watch tcp://h:1 --port 0 b", "b, --port: tcp://h:1 is a store, which has no page"),
    ("watch tcp://h:1 --host 127.0.0.1", "--host: tcp://h:1 is a store"),
    ("watch w --once --port 0", "--port: --once prints the state of one job"),
    ("watch w --json", "--json: it needs --once"),
    ("watch nowhere --html x.html", "WORKSPACE = 'nowhere': there is no such folder"),
    ("watch w --html x --port 1", "--port: --html writes a file, and serves no page"),
    ("doctor --hosts a", "--set, --rendezvous and --hosts are about a job: give its JOB.conf"),
    ("jobs list work", "work: is no URL of a store"),
    *(
        (f"jobs {verb} nowhere {words}", said)
        for verb in ("leave", "join")
        for words, said in (
            ("--group 1 --workers 1", "--workers = 1: must not be given with --group"),
            ("--workers 1", "WORKSPACE = 'nowhere': must be the workspace of a job with a launcher or a unit on this"),
            ("--within soon", "--within"),
            ("", "WORKSPACE = 'nowhere'"),
        )
    ),
    # Commands and options of earlier versions.
    ("leave workspace/digits --group 2", "this command is now: topotrain jobs leave workspace/digits --group 2\n"),
    ("join --group 2 --rendezvous redis://s/0 --job n", "topotrain jobs join redis://s/0 --group 2 --job n\n"),
    ("snapshot --rendezvous=redis://s/0 --help", "topotrain jobs snapshot redis://s/0 --help\n"),
    ("stop 'my job'", "topotrain jobs stop 'my job'\n"),
    ("report w --html a.html", "topotrain watch w --html a.html\n"),
    ("env", "topotrain doctor\n"),
    ("jobs list --rendezvous tcp://h:1", "--rendezvous was removed: topotrain jobs list tcp://h:1\n"),
    ("jobs stop n --rendezvous tcp://h:1", "topotrain jobs stop tcp://h:1 --job ID\n"),
)


def test_bad_input_is_refused_in_one_line_before_anything_starts(ask: Ask, here: Path, launcher: Launcher) -> None:
    (here / "typo.conf").write_text("cluster {\n  nworker_group: 2\n}\n")
    (here / "odd.conf").write_text("cluster { nworkers_per_group: 3 nworkers_per_procs: 2 }")
    (here / "train.ipynb").write_text("{}")
    (here / "trees").mkdir()
    (here / "trees" / "train.py").touch()
    files = sorted(here.rglob("*"))
    # Last: it makes the folder of its results before it looks at its jobs.
    for argv, said in sorted(REFUSED, key=lambda row: row[0].startswith("compare")):
        code, out, err = ask(*shlex.split(argv))
        assert (argv, code, out) == (argv, 2, "")
        assert err.startswith("topotrain: error: ") and said in err and err.count("\n") == 1, (argv, err)
        assert not launcher.jobs and not launcher.forkservers, argv
        assert argv.startswith("compare") or sorted(here.rglob("*")) == files, argv


# ---- run -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "launch local", "chaos", "compare --forkserver here"])
def test_a_module_in_place_of_a_script(ask: Ask, here: Path, launcher: Launcher, command: str) -> None:
    (here / "trees").mkdir()
    (here / "trees" / "train.py").write_text("raise RuntimeError('imported')\n")
    assert ask(*command.split(), "down.conf", "-m", "trees.train", "--lr", "2")[0] == 0
    assert (launcher.jobs[0].program, launcher.jobs[0].args) == ("-m trees.train", ("--lr", "2"))


def test_run_takes_program_and_arguments_from_its_words_or_from_the_file(
    ask: Ask, here: Path, launcher: Launcher
) -> None:
    code, out, err = ask("run", "down.conf", "--set", "seed=7", "train.py", "--json", "--set", "x")
    (job,) = launcher.jobs
    assert (code, job.program, job.args, job.seed) == (0, "train.py", ("--json", "--set", "x"), 7)
    assert job.cluster.nworker_groups == 2 and launcher.forkservers == 1
    assert out == "epoch 1\n" and "accuracy 96.0%" in err
    (here / "down.conf").write_text('program: "train.py" args: "--lr" args: "2" neuralnet { }' + DOWNPOUR)
    code, _, err = ask("run", "down.conf")
    assert (code, launcher.jobs[1].program, launcher.jobs[1].args) == (0, "train.py", ("--lr", "2"))
    assert err.count("topotrain: warning: ") == 1 and "neuralnet" in err, "it plays no part"


def test_the_result_as_json_and_a_full_disk_that_costs_only_the_report(
    ask: Ask, here: Path, launcher: Launcher
) -> None:
    """On stdout nothing else: the program's own lines go to stderr then."""
    code, out, err = ask("run", "down.conf", "--json", "--report", "deep/r.json", "train.py")
    assert (code, json.loads(out)) == (0, json.loads((here / "deep" / "r.json").read_text()))
    assert json.loads(out)["samples"] == 64 and "epoch 1" in err
    code, out, err = ask("run", "down.conf", "--json", "--report", "/dev/full", "train.py")
    assert (code, json.loads(out)["samples"]) == (0, 64)
    assert "topotrain: error: /dev/full: cannot be written (No space left on device)\n" in err
    assert "accuracy 96.0%" in err
    assert ask("run", "down.conf", "--quiet", "train.py") == (0, "epoch 1\n", "")


BOOM = Failed(
    "worker 1/0", "program", "ValueError: no", 'Traceback (most recent call last):\n  File "t"\nValueError: no'
)


def test_the_first_cause_and_the_code_of_the_job_are_those_of_the_command(
    ask: Ask, here: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher.ending = JobOutcome(1, 1.0, BOOM)
    code, _, err = ask("run", "down.conf", "--quiet", "--report", "r.json", "train.py")
    assert code == 1
    assert err.splitlines() == [
        "topotrain: error: worker 1/0 (unit 2) failed: ValueError: no",
        "  Traceback (most recent call last):",
        '    File "t"',
        "  ValueError: no",
        "  log: ./workspace/job/logs/worker-1-0.log",
    ]
    assert json.loads((here / "r.json").read_text())["cause"]["who"] == "worker 1/0"
    for code, said in ((130, "SIGINT"), (143, "SIGTERM"), (1, "logs"), (2, "logs")):
        launcher.ending = JobOutcome(code, 1.0)
        found, _, err = ask("run", "down.conf", "train.py")
        assert found == code and said in err
    for error, code in ((KeyboardInterrupt(), 130), (ConfigError("workspace", "/x", "no"), 2)):
        monkeypatch.setattr(launcher, "events", Mock(side_effect=error))
        assert ask("run", "down.conf", "train.py")[0] == code


# ---- compare ---------------------------------------------------------------------------------------------------------


@pytest.mark.journey
def test_compare(ask: Ask, here: Path, launcher: Launcher) -> None:
    (here / "ar.yaml").write_text("cluster: {nworkers_per_group: 2, nservers_per_group: 2}")
    code, out, err = ask("compare", "down.conf", "ar.yaml", "--out", "out", "train.py", "--", "--epochs", "2")
    assert code == 0
    assert [job.args for job in launcher.jobs] == [("--epochs", "2")] * 2
    assert [job.workspace for job in launcher.jobs] == ["out/down", "out/ar"]
    table = out[out.index("framework") :]
    assert "Downpour" in table and "AllReduce" in table and table.count("96.0%") == 2
    assert "out/frameworks.png" in err and (here / "out" / "frameworks.png").exists()
    jobs = json.loads((here / "out" / "compare.json").read_text())["jobs"]
    assert [job["conf"] for job in jobs] == ["down.conf", "ar.yaml"]


def test_compare_without_matplotlib_is_the_table_only(
    ask: Ask, here: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it raises ImportError
    monkeypatch.setattr("topotrain.tools.monitor.loss_curves.find_spec", {}.get)
    code, out, err = ask("compare", "--forkserver", "here", "down.conf", "train.py")
    assert code == 0
    assert "Downpour" in out and "96.0%" in out
    notices = [line for line in err.splitlines() if "matplotlib" in line]
    assert notices == ["table only: the picture needs matplotlib: pip install 'topotrain[plot]'"]
    assert "picture: " not in err and "compare.json" in err
    results = here / "workspace" / "compare"
    assert not (results / "frameworks.png").exists()
    code, out, _ = ask("compare", "--forkserver", "here", "--json", "down.conf", "train.py")
    assert code == 0 and json.loads(out) == json.loads((results / "compare.json").read_text())


# ---- docs ------------------------------------------------------------------------------------------------------------


def test_the_launcher_is_told_which_step_to_profile(ask: Ask, here: Path, launcher: Launcher) -> None:
    for options, step in (("", 0), ("--profile", 10), ("--profile-step 25", 25), ("--profile-step=1", 1)):
        launcher.profiles.clear()
        code, _, err = ask("run", *options.split(), "down.conf", "train.py", "--profile")  # the last is the program's
        assert (code, launcher.profiles) == (0, [step])
        assert ("no step was finished, so there is no trace" in err) is (step > 0)  # for this launcher starts nothing
    assert ask("run", "--profile-step", "0", "down.conf", "train.py")[0] == 2


def test_a_job_of_a_store_is_no_folder(ask: Ask, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPOTRAIN_RENDEZVOUS", "tcp://127.0.0.1:1")
    assert "a job of the store is --job night7\n" in ask("jobs", "stop", "night7")[2]


def test_the_reference_names_every_option_and_no_other_and_its_commands_parse() -> None:
    text = with_tables(DOCS.read_text())
    shown = [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("topotrain ")]
    assert {words[0] for words in shown} >= set(commands())
    for words in shown:
        if words[0] in commands():
            commands()[words[0]].make_context(words[0], words[1:])
    for name, command in commands().items():
        section = text.split(f"## `topotrain {name}`")[1].split("\n## ")[0]
        table = dict(re.findall(r"^\| `(--?[\w-]+).*?` \| (.+) \|$", section, re.M))
        assert {*table} == {*options(command)} - {"--help"}
        assert all(len(meaning.split()) > 3 for meaning in table.values()), table


def test_the_reference_names_every_field_of_the_report(ask: Ask, here: Path, launcher: Launcher) -> None:
    data = json.loads(ask("run", "down.conf", "--json", "train.py")[1])
    section = DOCS.read_text().split("## The report")[1].split("\n## ")[0]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    documented = set(re.findall(r"`(\w+)`", " ".join(rows)))
    incident = job_report.incident(Incident(0, "worker 1/0", "was killed", "starts again", 1.0), None)
    assert documented == set(data) | set(data["processes"][0]) | set(incident)


@pytest.mark.journey
def test_ctrl_c_while_the_command_still_imports_ends_it_in_order(tmp_path: Path) -> None:
    """A module in place of the first that it imports is interrupted."""
    (tmp_path / "typer.py").write_text(
        "import os, signal\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "while True: signal.sigtimedwait([signal.SIGUSR1], 0.01)\n"
    )
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"}
    command = [sys.executable, "-m", "topotrain", "run", "job.conf", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (130, "topotrain: error: ended by SIGINT, nothing was started\n")


# ---- figures for other tools -----------------------------------------------------------------------------------------


def test_what_is_no_port_is_told_what_is_one(ask: Ask, here: Path) -> None:
    for port in ("abc", "-1", "65536", "1.5", "٣"):
        for words in (["run", f"--watch={port}", "down.conf", "train.py"], ["watch", ".", f"--port={port}"]):
            code, _, err = ask(*words)
            assert code == 2
            assert f"{port!r} is no port: it must be a number from 0 to 65535" in " ".join(err.split())


def test_a_launch_on_this_machine_has_exports_and_says_once_that_there_is_no_snapshot(
    ask: Ask, here: Path, launcher: Launcher
) -> None:
    (here / "down.conf").write_text(DOWNPOUR + "resume: true\n")
    code, _, err = ask("launch", "local", "--metrics", "0", "--log", f"jsonl:{here}/c", "down.conf", "train.py")
    assert code == 0 and err.count("has no snapshot yet") == 1
    assert re.search(r"^metrics: http://127\.0\.0\.1:\d+/metrics$", err, re.MULTILINE), err
    losses = [line for line in map(json.loads, (here / "c").read_text().splitlines()) if line["name"] == "loss"]
    assert {"process": "worker 0/0", "value": 0.25}.items() <= losses[0].items()
