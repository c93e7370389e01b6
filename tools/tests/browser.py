"""A headless Chromium, driven through the pipes of its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--allow-file-access-from-files",
)


class Browser:
    """A tab of a browser, which opens pages of files; use it as a context manager.

    Attributes:
        found: the browser's command; None where none is installed.
    """

    found = next(filter(None, map(shutil.which, BROWSERS)), None)

    def __init__(self) -> None:
        assert self.found is not None
        reading, self._to_browser = os.pipe()
        self._from_browser, writing = os.pipe()
        # The browser reads its descriptor 3 and writes its descriptor 4.
        command = ["bash", "-c", f'exec "$@" 3<&{reading} 4>&{writing}', "bash", self.found, *_OPTIONS]
        self._process = subprocess.Popen(
            command, pass_fds=(reading, writing), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(reading)
        os.close(writing)
        self._number, self._read, self._session = 0, b"", ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._to_browser)  # the browser ends with its pipe
        os.close(self._from_browser)
        self._process.terminate()
        self._process.wait(10)

    def open(self, page: Path, query: str = "") -> None:
        """Open a page and wait until it is loaded."""
        self._call("Page.navigate", url=page.as_uri() + query)
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def resize(self, width: int, height: int = 900) -> None:
        """Show pages `width` pixels wide from here on."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def evaluate(self, script: str) -> Any:
        """Return the value of a script's expression, after its promise where it is one."""
        done = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def picture(self, file: Path, whole: bool = False) -> None:
        """Write what is seen, or the whole page, as PNG."""
        done = self._call("Page.captureScreenshot", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(done["data"]))

    def _call(self, method: str, **given: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": given}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != number:
            pass
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            more = os.read(self._from_browser, 1 << 16)
            assert more, "the browser has ended"
            self._read += more
        text, _, self._read = self._read.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message
