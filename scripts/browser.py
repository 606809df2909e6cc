"""A real browser without a screen: Chromium and its driver, as Debian has them. Nothing is downloaded.

Tests use it, and the pictures of the documentation.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCREENSHOTS = Path(__file__).parents[1] / "build" / "screenshots"
"""Pictures that tests leave behind, to be looked at."""
_WAIT_S = 60.0
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-device-scale-factor=1",
)


def why_none() -> str:
    """Return why there is no browser here; "": there is one."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if missing:
        return f"no {' and no '.join(missing)} here: apt-get install chromium chromium-driver"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "the package selenium is missing: pip install -e '.[dev]'"
    return ""


@dataclass(frozen=True, slots=True)
class Frames:
    """How fast a page draws.

    busy_ms: processor time of the page's main thread for a frame.
    """

    per_s: float
    busy_ms: float

    def __str__(self) -> str:
        return f"{self.per_s:.0f} frames/s, {self.busy_ms:.1f} ms of the main thread for each"


class NoBrowser(Exception):
    """There is no browser here; the text says what is missing."""


class Browser:
    """One window. `driver` is Selenium's."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def resize(self, width: int, height: int) -> None:
        """Give the page this size. Windows themselves cannot be as narrow as a telephone."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, **features: str) -> None:
        """Set what the reader prefers, as in CSS: color_scheme="dark"."""
        some = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": some})

    def see_as(self, deficiency: str) -> None:
        """Show the page as readers with a color vision deficiency see it; "none": as others do."""
        self.driver.execute_cdp_cmd("Emulation.setEmulatedVisionDeficiency", {"type": deficiency})

    def refuse(self, *patterns: str) -> None:
        """Let the page reach no address that one of these patterns matches, and all others."""
        self.driver.execute_cdp_cmd("Network.enable", {})
        self.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": list(patterns)})

    def open(self, address: str) -> None:
        """Open an address and wait until the page has drawn a job, with its charts."""
        self.driver.get(address)
        self.wait("return document.querySelectorAll('.process').length > 0")
        self.wait("return !window.Plotly || document.querySelector('#charts .main-svg') !== null")

    def script(self, text: str, *arguments: Any) -> Any:
        """Run a script in the page; return what it returns."""
        return self.driver.execute_script(text, *arguments)

    def wait(self, text: str, *arguments: Any, seconds: float = _WAIT_S) -> Any:
        """Run a script until it returns something true."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, seconds, 0.05).until(
            lambda driver: driver.execute_script(text, *arguments), f"never true: {text}"
        )

    def text(self, selector: str) -> str:
        """Return the text of an element, shown or not."""
        return str(self.script("return document.querySelector(arguments[0]).textContent", selector))

    def click(self, selector: str) -> None:
        """Click an element where the mouse would."""
        self.driver.find_element("css selector", selector).click()

    def press(self, *keys: str) -> None:
        """Press keys, as Selenium's `Keys` names them, or characters."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def problems(self) -> list[str]:
        """Return what the browser's console has complained about since the last call."""
        return [f"{entry['level']}: {entry['message']}" for entry in self.driver.get_log("browser")]

    def seen(self) -> bytes:
        """Return a picture of what is seen, as PNG."""
        return bytes(self.driver.get_screenshot_as_png())

    def picture(self, name: str) -> Path:
        """Keep a picture of what is seen."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        path.write_bytes(self.seen())
        return path

    def frames(self, seconds: float) -> Frames:
        """Count the frames that the page draws in this time."""
        script = """
            const [seconds, done] = arguments;
            let frames = 0, first = null;
            const count = (now) => {
              first ??= now;
              if (now - first >= seconds * 1000) { done([frames, (now - first) / 1000]); return; }
              frames += 1;
              requestAnimationFrame(count);
            };
            requestAnimationFrame(count);
        """
        self.driver.set_script_timeout(seconds + 60)
        self.driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        before = self._busy_s()
        count, passed = self.driver.execute_async_script(script, seconds)
        return Frames(count / passed, (self._busy_s() - before) * 1000 / max(1, count))

    def _busy_s(self) -> float:
        """Return the processor time of the page's main thread."""
        metrics = self.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))


@contextmanager
def chromium(width: int = 1400, height: int = 1000) -> Iterator[Browser]:
    """Start a browser with a profile of its own. Raises NoBrowser."""
    reason = why_none()
    if reason:
        raise NoBrowser(reason)
    from selenium import webdriver

    with tempfile.TemporaryDirectory(prefix="topotrain-browser-", ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        for flag in (*_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        # The path is given, so that Selenium looks for no driver elsewhere.
        service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"), log_output=os.devnull)
        driver = webdriver.Chrome(options=options, service=service)
        try:
            yield Browser(driver)
        finally:
            driver.quit()


def page_file(
    folder: Path,
    view: dict[str, Any],
    runs: list[dict[str, Any]] | None = None,
    logs: dict[str, str] | None = None,
) -> str:
    """Write the page of a view as one file; return its address."""
    from topotrain.tools.dashboard.page_files import mailed_page

    path = folder / "job.html"
    path.write_text(mailed_page(json.loads(json.dumps(view)), runs or [], logs), encoding="utf-8")
    return path.as_uri()
