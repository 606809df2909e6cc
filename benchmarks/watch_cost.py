"""What the page of a job costs: `python -m benchmarks.watch_cost [--rounds N]`.

* A step of about 20 ms of a job with `--watch`, while a page is open against while none is. The same worker takes both
  kinds of turns, so nothing but the page differs. The page asks as in a browser, and draws nothing.
* The processor time of `topotrain watch` for the recording of a job with 200 processes, in shares of one core, while a
  page is open and while none is. The recording is written by the launcher's own writer, with the samples that processes
  send.
"""

import argparse
import http.client
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from benchmarks.harness import Figure, Row, Samples, interleave, row
from benchmarks.processor import processor_seconds
from benchmarks.record import run_table
from benchmarks.sides import Sides, cluster, environment
from topotrain.config.job import Cluster
from topotrain.config.topology import layout
from topotrain.core.events import Event, Resources, ServerLoad, StepDone, Traffic
from topotrain.tools.recording.recorded_layout import layout_data
from topotrain.tools.recording.recorded_lines import RecordingHeader
from topotrain.tools.recording.recording_file import FILE, RecordingWriter

NAME, TITLE, GOALS = "watch_cost", "What the page of a job costs", ()
WORKERS, SERVERS = 190, 10
_REPORTS_S = 0.25  # between two reports of a process
_URL = re.compile(r"http://127\.0\.0\.1:(\d+)(/login\S+)")


class OpenPage:
    """A page as the server sees it: logged in, and able to ask what is new."""

    def __init__(self, said: Path) -> None:
        until = time.monotonic() + 60
        while (found := _URL.search(said.read_text())) is None:
            if time.monotonic() > until:
                raise RuntimeError(f"no address in {said.read_text()!r}")
            time.sleep(0.05)
        self._port = int(found.group(1))
        with closing(self._connection()) as connection:
            connection.request("GET", found.group(2))
            answer = connection.getresponse()
            self._cookie = str(answer.getheader("Set-Cookie")).partition(";")[0]
            self._root = str(answer.getheader("Location"))

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Ask for what is new for the length of the block."""
        over = threading.Event()
        thread = threading.Thread(target=self._follow, args=(over,))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _follow(self, over: threading.Event) -> None:
        asked = ""
        while not over.is_set():
            with closing(self._connection()) as connection:
                connection.request("GET", f"{self._root}api/view{asked}", headers={"Cookie": self._cookie})
                response = connection.getresponse()
                text = response.read()
            if response.status != 200:
                raise RuntimeError(f"the page was refused: {text!r}")
            asked = f"?cursor={json.loads(text)['cursor']}"


def steps(rounds: int, count: int) -> list[Row]:
    """A step with a page open against one without."""
    with Sides() as sides:
        side = sides.job("watched", cluster(workers=1), 1, "twenty", cold=True, options=("--watch", "0"))
        page = OpenPage(side.folder / "0.err")

        def watched() -> float:
            with page.open():
                return side.run(count)

        found = interleave({"open": watched, "closed": lambda: side.run(count)}, rounds)
    percent = _percent(found["open"].over(found["closed"]))
    step_ms = found["closed"].median * 1e3
    note = f"a step takes {step_ms:.1f} ms without; {rounds} rounds of {count} steps each way"
    return [row("", "a step with the page open, over one without", percent, "%", "<= 1", note)]


def _percent(ratio: Figure) -> Figure:
    return Figure(*(100 * (value - 1) for value in (ratio.value, ratio.low, ratio.high)))


def server(rounds: int, seconds: float) -> list[Row]:
    """The share of a core that the server takes for a job with many processes."""
    with Sides() as sides:
        folder = sides.room("many")
        said, over = folder / "said", threading.Event()
        writer = threading.Thread(target=_record, args=(folder, over))
        writer.start()
        try:
            _wait_for(folder / FILE)
            command = [sys.executable, "-m", "topotrain", "watch", str(folder)]
            with said.open("w") as out, subprocess.Popen(command, env=environment(), stderr=out) as process:
                try:
                    page = OpenPage(said)

                    def watched() -> float:
                        with page.open():
                            return _share(process.pid, seconds)

                    turns = {"open": watched, "closed": lambda: _share(process.pid, seconds)}
                    found = interleave(turns, rounds)
                finally:
                    process.terminate()
        finally:
            over.set()
            writer.join()
    what = f"server of the page, {WORKERS + SERVERS} processes: share of one core, "
    note = f"{rounds} rounds of {seconds:g} s"
    return [_shares(what + "one page open", found["open"], note), _shares(what + "no page open", found["closed"], note)]


def _shares(what: str, samples: Samples, note: str) -> Row:
    return row("", what, samples.figure.times(100), "%", "<= 5", note)


def _share(pid: int, seconds: float) -> float:
    before, began = processor_seconds([pid]), time.monotonic()
    time.sleep(seconds)
    return (processor_seconds([pid]) - before) / (time.monotonic() - began)


def _wait_for(file: Path) -> None:
    until = time.monotonic() + 60
    while not file.exists():
        if time.monotonic() > until:
            raise RuntimeError(f"{file.name} was not written")
        time.sleep(0.05)


def _record(workspace: Path, over: threading.Event) -> None:
    """Write the recording of a job with many processes, as its launcher does."""
    topology = layout(Cluster(nworker_groups=WORKERS, nservers_per_group=SERVERS, server_worker_separate=True))
    header = RecordingHeader(started=time.time(), job={"name": "many"}, layout=layout_data(topology))
    writer = RecordingWriter(workspace / FILE, header, time.monotonic)
    number = 0
    while not over.wait(_REPORTS_S):
        number += 1
        for event in _reports(number):
            writer.write(event)
    writer.close(0)


def _reports(number: int) -> Iterator[Event]:
    """What all processes report at one time."""
    at = number * _REPORTS_S
    for group in range(WORKERS):
        who = f"worker {group}/0"
        yield StepDone(who, at, 10 * number, 320 * number, 1 / number, 1.5, 4, 1000 * number, 1000 * number)
        if number % 2 == 0:
            yield Traffic(who, {f"server 0/{server}": 1000 * number for server in range(SERVERS)})
            yield Resources(who, 1000 + group, 500_000_000 + number, at)
    for server_index in range(SERVERS if number % 2 == 0 else 0):
        yield ServerLoad(f"server 0/{server_index}", 1900 * number, 1900 * number, at / 3)


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, default=50, help="per turn")
    parser.add_argument("--seconds", type=float, default=10.0, help="per turn of the server")
    parser.add_argument("--turns", type=int, default=5, help="of the server")


def measure(options: argparse.Namespace) -> Sequence[Row]:
    return [*steps(options.rounds, options.steps), *server(options.turns, options.seconds)]


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, declare)
