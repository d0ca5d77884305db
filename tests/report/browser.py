"""A real headless Chromium, spoken to in its DevTools protocol over a pair of pipes: no further package is needed.

Run ``python -m tests.report.browser PAGE.html OUT.png [--width 390] [--dark] [--height 800]`` for a picture of a page.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""None where there is none."""


class Browser:
    """One tab.

    Args:
        to: what the browser reads.
        said: what it writes.
    """

    def __init__(self, to: BinaryIO, said: BinaryIO) -> None:
        self._to, self._said, self._session, self._number = to, said, "", 0
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask, and wait for the answer; what the browser tells meanwhile is kept in ``events``."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._to.write(json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0")
        self._to.flush()
        while (answer := self._read()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, page: Path, width: int, *, dark: bool = False, height: int = 800) -> None:
        """Load a page in a window of this width: a phone's below 600."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=page.absolute().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        """The value of some JavaScript in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def complaints(self) -> list[dict[str, Any]]:
        """What the console has, exceptions, and requests for anything but the page, since it was opened."""
        self.evaluate("0")  # whatever was said before this has arrived
        kinds = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        requests = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event for event in self.events if event.get("method") in kinds] + requests[1:]

    def picture(self, *, whole: bool = False) -> bytes:
        """A PNG of the window, or of the whole page."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True)["data"])

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._said.read(1)) != b"\0":
            assert byte, "the browser is gone"
            text += byte
        message: dict[str, Any] = json.loads(text)
        return message


@contextmanager
def browser() -> Iterator[Browser]:
    """A fresh one, ended afterwards."""
    assert CHROMIUM is not None
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # Chromium reads file 3 and writes file 4; a sandbox needs rights that a container may not have.
        flags = ["headless", "remote-debugging-pipe", "no-sandbox", "disable-gpu", "hide-scrollbars",
                 "disable-dev-shm-usage", f"user-data-dir={profile}"]  # fmt: skip
        words = [CHROMIUM, *(f"--{flag}" for flag in flags), "about:blank"]
        process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{their_in} 4>&{their_out}', "bash", *words],
            pass_fds=(their_in, their_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        try:
            with os.fdopen(our_out, "wb") as to, os.fdopen(our_in, "rb") as said:
                yield Browser(to, said)
        finally:
            process.terminate()
            process.wait(timeout=30)


def main() -> None:
    """A picture of a page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=800)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--whole", action="store_true")
    given = parser.parse_args()
    with browser() as found:
        found.open(given.page, given.width, dark=given.dark, height=given.height)
        given.out.write_bytes(found.picture(whole=given.whole))


if __name__ == "__main__":
    main()
