"""Other libraries' loops in a job: the examples of docs/integrations.md, and the same scripts as ordinary processes.

The forkserver of these jobs has the libraries loaded: importing them takes longer than the training.
"""

import json
import os
import socket
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from job_runner import Ended, JobRunner
from library_forkserver import OFFLINE
from safetensors.torch import load_file
from seeds import SOAK, soak_only

from topotrain.launch.agent import forkserver

pytestmark = pytest.mark.journey

EXAMPLES = Path(__file__).parents[2] / "examples"
SYNCHRONOUS = "nworkers_per_group: 2 server_worker_separate: true"


@dataclass(frozen=True)
class Library:
    """An example, what it needs and is told, and the file it writes in `out`."""

    program: str
    needs: str
    words: tuple[str, ...]
    out: str
    saved: str

    def arguments(self, folder: Path) -> list[str]:
        return [*self.words, "--out", str(folder / self.out)]

    def result(self, folder: Path) -> dict[str, torch.Tensor]:
        path = folder / self.saved
        found = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=False)
        return found.get("state_dict", found)


# 605 texts: the last batch has 29, and the two workers of a group 15 and 14 of them.
SUMS = ("--epochs", "2", "--samples", "605", "--optim", "sgd", "--rate", "0.1")
LIBRARIES = {
    "transformers": Library("huggingface.py", "transformers", SUMS, "out", "out/model.safetensors"),
    "accelerate": Library("accelerate_loop.py", "accelerate", ("--epochs", "2"), "model.pt", "model.pt"),
    "lightning": Library("lightning_digits.py", "pytorch_lightning", ("--epochs", "2"), "out", "out/last.ckpt"),
}
OUTER = "outer { type: kSGD learning_rate { type: kFixed base_lr: 1 } }"
ISLAND = f"nworker_groups: 1 server_worker_separate: true sync_freq: 5 {OUTER}"
PHASES = Library("../tests/programs/lightning_phases.py", "pytorch_lightning", (), "phases.pt", "phases.pt")
IN_PARTS = Library("../tests/programs/accelerated.py", "accelerate", (), "in_parts.pt", "in_parts.pt")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, loaded_at: str) -> dict[str, dict[str, torch.Tensor]]:
    """What each script saves as an ordinary process."""
    folder = tmp_path_factory.mktemp("plain")
    with closing(forkserver.ForkserverClient(loaded_at)) as client:
        found = {}
        for name, library in {**LIBRARIES, "phases": PHASES, **({"in parts": IN_PARTS} if SOAK else {})}.items():
            run_ordinary(client, folder, name, library)
            found[name] = library.result(folder)
        found["facts"] = facts_in(folder, 1)[0]
    return found


def facts_in(folder: Path, workers: int) -> list[dict[str, torch.Tensor]]:
    """What each worker knew behind each phase of PHASES."""
    files = [json.loads((folder / f"facts-{rank}.json").read_text()) for rank in range(workers)]
    return [{f"{n} {k}": torch.tensor(v) for n, phase in enumerate(f) for k, v in phase.items()} for f in files]


def run_ordinary(client: forkserver.ForkserverClient, folder: Path, name: str, library: Library) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, open(folder / f"{name}.log", "wb") as log:
        request = forkserver.ForkRequest(
            who=name,
            call="tests.programs.ordinary:run",
            spec={"argv": [str(EXAMPLES / library.program), *library.arguments(folder)]},
            control=theirs.fileno(),
            stdout=log.fileno(),
            stderr=log.fileno(),
            environ={**os.environ, **OFFLINE},
        )
        client.spawn(request)
        answers: list[dict[str, object]] = []
        while not any("exit" in answer or "error" in answer for answer in answers):
            more = client.receive()
            assert more is not None, "the forkserver is gone"
            answers += more
    assert answers[-1].get("exit") == 0, (answers, (folder / f"{name}.log").read_text())


@pytest.fixture
def runner(library_runner: JobRunner, monkeypatch: pytest.MonkeyPatch) -> JobRunner:
    # What a launcher of processes would say: the libraries must not wait for a second one.
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    return library_runner


def train(runner: JobRunner, library: Library, cluster: str, extra: str = "") -> Ended:
    return runner.run(cluster, str(EXAMPLES / library.program), *library.arguments(runner.folder), extra=extra)


@pytest.mark.parametrize(
    ("name", "extra", "most"),
    [("transformers", "", 1e-6), ("accelerate", "grads: kHidden", 1e-5), ("lightning", "", 1e-6)],
)
def test_two_workers_end_where_one_ordinary_process_does(
    runner: JobRunner, plain: dict[str, dict[str, torch.Tensor]], name: str, extra: str, most: float
) -> None:
    """The servers clip where the script does not see the mean."""
    ended = train(runner, LIBRARIES[name], SYNCHRONOUS, extra)
    expected, final = plain[name], ended.final
    assert final.keys() <= expected.keys()
    for parameter, value in final.items():
        assert (value - expected[parameter]).abs().max() <= most, parameter
    saved = LIBRARIES[name].result(runner.folder)
    assert all(torch.equal(value, saved[parameter]) for parameter, value in final.items())
    assert only_the_main_worker_speaks(ended)
    steps = [process["steps"] for process in ended.report["processes"] if process["workers"]]
    assert steps == [20 if name == "transformers" else 46] * 2


def only_the_main_worker_speaks(ended: Ended) -> bool:
    """Whether numbers of the training stand in its output, and in no other worker's."""
    words = ("'loss'", "'eval_loss'", "accuracy:")
    (log,) = (ended.workspace / "logs").glob("worker-0-1*")
    return any(word in ended.out for word in words) and not any(word in log.read_text() for word in words)


def test_phases_of_lightning_with_the_best_weights_and_averages_are_exact_on_all_workers(
    runner: JobRunner, plain: dict[str, dict[str, torch.Tensor]]
) -> None:
    train(runner, PHASES, ISLAND)
    for found in (PHASES.result(runner.folder), *facts_in(runner.folder, 1)):
        expected = plain["facts" if "0 steps" in found else "phases"]
        assert found.keys() == expected.keys()
        assert all((value - expected[name]).abs().max() <= 1e-5 for name, value in found.items()), (found, expected)


STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(read_digits()[0])


"""

REFUSED = [
    (
        "huggingface.py",
        [
            (
                "trainer.train()",
                "trainer.train(resume_from_checkpoint='here')",
                "resume_from_checkpoint = 'here': must be left out: a job goes on from its own snapshots",
            ),
            (
                "        report_to=",
                "        ignore_data_skip=True,\n        report_to=",
                "ignore_data_skip = true: must be false: the batches that count are skipped when a job goes on",
            ),
            (
                "        save_total_limit=1,",
                "        load_best_model_at_end=True,",
                "load_best_model_at_end = true: must be false",
            ),
            (
                "options.samples, seed=1",
                "97, seed=1",
                "dataloader_drop_last = false: a batch has fewer samples than the group has workers",
            ),
        ],
    ),
    (
        "huggingface.py",
        [
            (
                "def main() -> None:",
                "class Own(Trainer):\n    def compute_loss(self, model, inputs, return_outputs=False, **_):\n"
                "        return super().compute_loss(model, inputs, return_outputs)\n\n\n"
                "def main() -> None:\n    Trainer = Own",
                "compute_loss = 'Own': must divide a sum over the labels by num_items_in_batch",
            ),
        ],
    ),
    (
        "huggingface.py",
        [
            (
                "trainer.train()",
                "trainer.train()\n    trainer.model = trainer.model_wrapped = build_model()\n    trainer.train()",
                "must train the model of the job's first train(): that of another one, as in a search, is a job",
            ),
        ],
    ),
    (
        "accelerate_loop.py",
        [
            (
                "model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)",
                "optimizer, loader = accelerator.prepare(optimizer, loader)",
                "tt.prepare = 'Adam': must come with the torch.nn.Module that it trains",
            ),
            (
                "    for _ in range(options.epochs):",
                "    loader = accelerator.skip_first_batches(loader, 3)\n    for _ in range(options.epochs):",
                "skip_first_batches = 3: must be left out: the loader of a job that goes on leaves out the batches",
            ),
        ],
    ),
    (
        "accelerate_loop.py",
        [
            (
                "        for images, labels in loader:",
                "        extra = accelerator.prepare(DataLoader(train, batch_size=32, shuffle=True))\n"
                "        for (images, labels), _ in zip(loader, extra):",
                "is read in a pass over another loader: train on one (StackDataset(a, b)), and validate in",
            ),
        ],
    ),
    (
        "lightning_digits.py",
        [
            (
                "accumulate_grad_batches=2,",
                "reload_dataloaders_every_n_epochs=1,",
                "reload_dataloaders_every_n_epochs = 1: must be 0: the loader is divided once",
            ),
            (
                "accumulate_grad_batches=2,",
                "callbacks=[pl.callbacks.LearningRateFinder()],",
                "LearningRateFinder = true: must be left out: the search goes by the loss of one worker's share",
            ),
            (
                "accumulate_grad_batches=2,",
                "callbacks=[pl.callbacks.ModelPruning('l1_unstructured', amount=0.3)],",
                "ModelPruning = true: must be left out: it replaces parameters that the servers hold",
            ),
        ],
    ),
]
"""Example, and lines of it, each with what stands in its place and the words of the refusal. The last one ends the job.

What is refused behind the first step, on one worker, is a job of its own.
"""
ALL_REFUSED = """
import topotrain as tt

for text in TEXTS[:-1]:
    try:
        exec(compile(text, "example.py", "exec"), {"__name__": "__main__"})
    except tt.ConfigError as error:
        print("refused:", error, flush=True)
exec(compile(TEXTS[-1], "example.py", "exec"), {"__name__": "__main__"})
"""


def test_a_death_ends_the_job_where_the_library_counts_batches_of_a_stream(runner: JobRunner) -> None:
    text = (EXAMPLES / "lightning_digits.py").read_text()
    for line, instead in (
        ("DataLoader(train, batch_size=32, shuffle=True)", "DataLoader(Stream(), batch_size=32)"),
        ("class Digits(", STREAM + "class Digits("),
        ("return nn.functional", "os.kill(os.getpid(), signal.SIGKILL)\n        return nn.functional"),
    ):
        assert line in text
        text = text.replace(line, instead)
    (runner.folder / "digits.py").write_text((EXAMPLES / "digits.py").read_text())
    program = runner.folder / "lightning_digits.py"
    program.write_text("import os, signal\n" + text)
    ended = runner.run(SYNCHRONOUS, str(program), "--out", str(runner.folder / "out"), "--epochs", "1", code=1)
    words = "it does not start again: the library's loop counts batches, and the loader has no length"
    assert "was killed by SIGKILL" in ended.err and words in " ".join(ended.err.split()), ended.err
    assert ended.report["incidents"] == []


@pytest.mark.parametrize(("program", "variants"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_hold_in_a_job_is_refused_with_a_reason(
    runner: JobRunner, program: str, variants: list[tuple[str, str, str]]
) -> None:
    text, texts = (EXAMPLES / program).read_text(), []
    for line, instead, _ in variants:
        assert line in text
        texts.append(text.replace(line, instead))
    (runner.folder / "digits.py").write_text((EXAMPLES / "digits.py").read_text())
    script = runner.folder / program
    script.write_text(f"TEXTS = {texts!r}\n{ALL_REFUSED}")
    ended = runner.run(SYNCHRONOUS, str(script), "--out", str(runner.folder / "out"), "--epochs", "1", code=2)
    said = " ".join(f"{ended.out} {ended.err}".split())
    assert [words for _, _, words in variants if words not in said] == [], said


@soak_only
def test_what_accelerate_prepares_may_come_in_several_calls(
    runner: JobRunner, plain: dict[str, dict[str, torch.Tensor]]
) -> None:
    train(runner, IN_PARTS, SYNCHRONOUS)
    expected, saved = plain["in parts"], IN_PARTS.result(runner.folder)
    assert len(expected) == 9 and expected.keys() == saved.keys()
    for name, value in saved.items():
        assert (value - expected[name]).abs().max() <= 1e-5, name
