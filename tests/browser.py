"""A headless Chromium, driven over its DevTools protocol through two pipes: no driver and no package is needed."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
LAUNCH = """
import fcntl, os, sys
kept = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for number, own in zip(kept, (3, 4)):
    os.dup2(number, own)
    os.close(number)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def chromium() -> str | None:
    """The program, if this machine has one; SAKIYOMI_CHROMIUM names another."""
    return os.environ.get("SAKIYOMI_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One page. ``problems`` has what its console and its policy complained of."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._rest = to, back, b""
        self._ids = itertools.count(1)
        self._session: str | None = None
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """A command, and what it gives back."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None and not method.startswith("Target."):
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        until = time.monotonic() + 60
        while True:
            found = self._read(until)
            if found.get("id") == number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return found["result"]
            if found.get("method") == "Runtime.exceptionThrown":
                self.problems.append(str(found["params"]["exceptionDetails"]))
            if found.get("method") == "Log.entryAdded" and found["params"]["entry"]["level"] == "error":
                self.problems.append(found["params"]["entry"]["text"])

    def _read(self, until: float) -> Any:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._back], [], [], max(0.0, until - time.monotonic()))
            data = os.read(self._back, 1 << 16) if ready else b""
            if not data:
                raise TimeoutError("the browser does not answer")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def open(self, url: str) -> None:
        """Load a page."""
        if problem := self.call("Page.navigate", url=url).get("errorText"):
            raise RuntimeError(f"{url}: {problem}")
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of an expression."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 30.0) -> Any:
        """Wait until an expression is true; its value."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            if time.monotonic() > end:
                raise AssertionError(f"not within {seconds:g} s: {script}")
            time.sleep(0.02)
        return found

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """A key, as a keyboard gives it."""
        code = {"Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowLeft": 37, "Tab": 9, "End": 35, "Home": 36}[key]
        values = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **values, **({"text": "\r"} if key == "Enter" else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **values)

    def click(self, selector: str, times: int = 1) -> None:
        """The mouse, on the middle of an element; a second time is a double click."""
        x, y = self.run(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'nearest'}});"
            "const r = e.getClientRects()[0]; return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for count in range(1, times + 1):
            for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
                self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=count)

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        """Of the window."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def dark(self, on: bool) -> None:
        """What the system prefers."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> None:
        """A screenshot, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def tab(program: str, profile: Path, language: str = "en-US") -> Iterator[Tab]:
    """A browser with one page, which ends with the block."""
    theirs_in, to = os.pipe()
    back, theirs_out = os.pipe()
    options = [
        "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-background-networking", f"--lang={language}", f"--accept-lang={language}",
        f"--user-data-dir={profile}",
    ]  # fmt: skip
    # The browser reads commands from its descriptor 3 and writes to 4.
    launch = [sys.executable, "-c", LAUNCH, str(theirs_in), str(theirs_out), program, *options]
    browser = subprocess.Popen(
        launch,
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Tab(to, back)
    finally:
        os.close(to)  # its end
        os.close(back)
        try:
            browser.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()
