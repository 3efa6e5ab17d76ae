"""A headless Chromium for tests of pages: opens an address, waits for what it shows, collects errors, takes pictures.

Speaks the DevTools protocol over a pair of pipes, so that nothing has to be installed besides the browser.

PYTHONPATH=tests python -m harness.browser ADDRESS PICTURE.png [WIDTH HEIGHT [SECONDS]] takes a picture.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from harness.helper_process import last_words

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WHY_NOT = "no chromium on this machine, in which to open the page"
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    "--remote-debugging-pipe",
)
# The browser reads commands from descriptor 3 and answers on 4. Shells redirect no descriptors above 9.
PLUMBER = (
    "import fcntl, os, sys; "
    "ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]; "
    "[os.dup2(end, number) for number, end in zip((3, 4), ends)]; "
    "os.execv(sys.argv[3], sys.argv[3:])"
)
ANSWER_S = 120.0
# MLflow opens its assistant over a quarter of the first page that a browser shows; a person closes it once.
CLOSED_ASSISTANT = 'localStorage.setItem("mlflow.assistant.fab.autoOpenedOnFirstLoad_v1", "true")'


class Browser:
    """One page. errors: what it wrote to the console as an error, its exceptions, and its requests that failed.
    requests: the addresses that it asked for."""

    def __init__(self, width: int = 1600, height: int = 1200) -> None:
        self._folder = tempfile.mkdtemp(prefix="browser")
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        words = [str(CHROMIUM), *FLAGS, f"--user-data-dir={self._folder}", f"--window-size={width},{height}"]
        start = [sys.executable, "-S", "-c", PLUMBER, str(theirs_in), str(theirs_out), *words]
        quiet, self._errors = subprocess.DEVNULL, tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            start, pass_fds=(theirs_in, theirs_out), stdin=quiet, stdout=quiet, stderr=self._errors
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out, self._unread, self._number = ours_in, ours_out, b"", 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._session = ""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **metrics)
        self.ask("Page.addScriptToEvaluateOnNewDocument", source=CLOSED_ASSISTANT)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._folder, ignore_errors=True)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to one command of the protocol."""
        self._number += 1
        command: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        command |= {"sessionId": self._session} if self._session else {}
        try:
            os.write(self._out, json.dumps(command).encode() + b"\0")
        except BrokenPipeError:
            self._fail()
        deadline = time.monotonic() + ANSWER_S
        while True:
            message = self._next(deadline)
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                answer: dict[str, Any] = message["result"]
                return answer

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            readable, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"the browser did not answer within {ANSWER_S:g} s"
            self._unread += os.read(self._in, 1 << 20) or self._fail()
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message)
        return message

    def _fail(self) -> NoReturn:
        raise AssertionError(last_words("the browser", self._process, self._errors))

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description", details["text"])))
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(" ".join(str(one.get("value", one.get("description"))) for one in params["args"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, address: str) -> None:
        self.ask("Page.navigate", url=address)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page, or of what it promises."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = ANSWER_S) -> Any:
        """The first value of the expression that is true; the page is asked until then."""
        deadline = time.monotonic() + seconds
        asked = f"new Promise(done => setTimeout(() => done({expression}), 100))"
        while not (value := self.value(asked)):
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {expression}\n{self.text()[-2000:]}"
        return value

    def text(self) -> str:
        return str(self.value("document.body ? document.body.innerText : ''"))

    def picture(self, path: Path) -> None:
        """A PNG of what the window shows."""
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))


def main(argv: list[str]) -> int:
    address, path = argv[0], Path(argv[1])
    width, height = (int(argv[2]), int(argv[3])) if len(argv) > 3 else (1600, 1200)
    with Browser(width, height) as browser:
        browser.open(address)
        browser.value(f"new Promise(done => setTimeout(done, {1000 * int(argv[4]) if len(argv) > 4 else 15000}))")
        browser.picture(path)
        print("\n".join(browser.errors))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
