"""Make the pictures of the page of a job, from real jobs in a headless Chromium.

    python scripts/page_pictures.py

Trains examples/digits.py under two frameworks, and kills a worker of the first job. It takes some minutes on two cores,
and writes the pictures that README.md and docs/ show.

The exit code is 0 if all pictures are made, 1 if a page complains or a picture is too large, 3 without a browser.
"""

import argparse
import io
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from browser import Browser, NoBrowser, chromium
from page_command import WatchedJob, watching

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
NAMES = ("page-map", "page-curves", "page-replay", "page-runs", "page-runs-charts")
LIMIT_BYTES = 150_000
WIDTH, HEIGHT = 1280, 860
_COLORS = 256
_VICTIM, _SHOWN = "worker 1/0", "worker 0/0"
_STATE = "document.querySelector(\"[data-name='{}']\").dataset.state"
_HEARD = "document.querySelectorAll(\".event[data-kind='{}']\").length > 0"


class NotMade(Exception):
    """A picture that cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class Pictures:
    """Takes the pictures, and keeps them in a folder."""

    browser: Browser
    folder: Path

    def open(self, address: str, theme: str) -> None:
        """Open a page in a theme, and wait for its curves."""
        self.browser.open(address)
        self.choose(theme)
        self.browser.wait("return document.querySelectorAll('.annotation').length >= 3")

    def choose(self, theme: str) -> None:
        """Choose light or dark, as a reader does."""
        change = "s.value = arguments[0]; s.dispatchEvent(new Event('change'));"
        self.browser.script(f"const s = document.getElementById('theme'); {change}", theme)

    def scroll_to(self, selector: str) -> None:
        """Bring an element to the top of the window."""
        self.browser.script("document.querySelector(arguments[0]).scrollIntoView({block: 'start'})", selector)

    def take(self, name: str) -> None:
        """Keep what is seen. Raises NotMade."""
        # Two frames: what the last script has changed is drawn then.
        self.browser.frames(0.2)
        problems = self.browser.problems()
        if problems:
            raise NotMade(f"{name}: the page complains: {'; '.join(problems)}")
        data = _smaller(self.browser.seen())
        if len(data) > LIMIT_BYTES:
            raise NotMade(f"{name}: has {len(data):,} bytes, must be at most {LIMIT_BYTES:,}")
        path = self.folder / f"{name}.png"
        path.write_bytes(data)
        print(f"{path}: {len(data):,} bytes")


def _smaller(png: bytes) -> bytes:
    """Return a picture with a palette: a page has few colors."""
    from PIL import Image

    made = io.BytesIO()
    with Image.open(io.BytesIO(png)) as picture:
        picture.convert("RGB").quantize(_COLORS, dither=Image.Dither.NONE).save(made, "PNG", optimize=True)
    return made.getvalue()


def of_running_job(pictures: Pictures, folder: Path) -> None:
    """Show a job while it runs, and kill one of its workers afterwards."""
    with _job("downpour", folder, "--epochs", "60") as job:
        browser = pictures.browser
        pictures.open(job.address, "light")
        browser.click(f"[data-name='{_SHOWN}']")
        # All have trained for a while, so that each process has its figures.
        browser.wait("return Number(document.getElementById('job-progress').value) > 0.3")
        browser.wait(f"return {_STATE.format(_VICTIM)} === 'computes'")
        browser.script("window.scrollTo(0, 0)")
        pictures.take("page-map")
        os.kill(job.pid_of(folder / "downpour", _VICTIM), signal.SIGKILL)
        browser.wait(f"return {_HEARD.format('recovered')}")
        browser.wait("return document.body.dataset.connection === 'recorded'")
        _ended_well(job)


def of_recorded_jobs(pictures: Pictures, folder: Path) -> None:
    """Show the job with the death again, and beside a second one."""
    browser = pictures.browser
    with _job("sandblaster", folder, "--epochs", "60") as job:
        _ended_well(job)
    with watching(_topotrain("watch", "downpour"), folder, "said-watch") as page:
        pictures.open(page.address, "light")
        browser.click(".event[data-kind='incident']")
        browser.wait(f"return {_STATE.format(_VICTIM)} === 'dead'")
        browser.script("window.scrollTo(0, 0)")
        pictures.take("page-replay")
        pictures.choose("dark")
        browser.click("#moment-follow")
        pictures.scroll_to("#charts-section")
        pictures.take("page-curves")
    with watching(_topotrain("watch", "."), folder, "said-two") as page:
        pictures.open(page.address, "dark")
        browser.wait("return document.getElementById('run-rows').textContent.includes('sandblaster')")
        pictures.scroll_to("#runs")
        pictures.take("page-runs")
        pictures.scroll_to("#charts-section")
        pictures.take("page-runs-charts")


@contextmanager
def _job(framework: str, folder: Path, *args: str) -> Iterator[WatchedJob]:
    """Train on digits under a framework, in a workspace of its name, with a page."""
    setting = ("--set", f"cluster.workspace={framework}", "--set", f"name={framework}")
    files = (str(ROOT / "examples" / "conf" / f"{framework}.conf"), str(ROOT / "examples" / "digits.py"))
    words = _topotrain("run", "--quiet", "--watch", "0", *setting, *files, *args)
    with watching(words, folder, f"said-{framework}") as job:
        yield job


def _topotrain(*words: str) -> list[str]:
    return [sys.executable, "-m", "topotrain", *words]


def _ended_well(job: WatchedJob) -> None:
    code = job.end(120)
    if code:
        raise NotMade(f"a job ended with code {code}:\n{job.said.read_text(encoding='utf-8')}")


def main() -> int:
    opening, _, rest = str(__doc__).partition("\n")
    parser = argparse.ArgumentParser(
        description=opening, epilog=rest.strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=PICTURES, metavar="DIR", help="folder of the pictures")
    out = parser.parse_args().out.absolute()
    if not out.is_dir():
        parser.error(f"--out {out}: must be a folder, and there is none")
    # The jobs of this checkout, and not those of an installed topotrain.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    try:
        with tempfile.TemporaryDirectory(prefix="topotrain-pictures-") as folder, chromium(WIDTH, HEIGHT) as browser:
            browser.resize(WIDTH, HEIGHT)
            browser.prefer(color_scheme="light", reduced_motion="no-preference")
            pictures = Pictures(browser, out)
            for make in (of_running_job, of_recorded_jobs):
                make(pictures, Path(folder))
    except NoBrowser as reason:
        print(f"no pictures: {reason}", file=sys.stderr)
        return 3
    except NotMade as reason:
        print(reason, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
