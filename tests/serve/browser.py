"""A headless Chromium, by the WebDriver protocol."""

from __future__ import annotations

import re
import subprocess
import time
from typing import Any

import httpx

_ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key by which WebDriver names elements
WAIT_S = 180.0


class Browser:
    """One window. ``close`` ends it, and the driver."""

    def __init__(self, driver: str, profile: str) -> None:
        self._process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        lines = iter(self._process.stdout.readline, "")
        port = next(found[1] for line in lines if (found := re.search(r"on port (\d+)\.", line)))
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)
        options = {"args": [*_ARGUMENTS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        try:
            session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        except BaseException:
            self._process.kill()
            raise
        self._base = f"/session/{session['sessionId']}"

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self._http.request(method, path, json=body if method == "POST" else None).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer

    def open(self, url: str) -> None:
        self._call("POST", f"{self._base}/url", {"url": url})

    def run(self, script: str) -> Any:
        """What a script returns."""
        return self._call("POST", f"{self._base}/execute/sync", {"script": script, "args": []})

    def _element(self, selector: str) -> str:
        found = self._call("POST", f"{self._base}/element", {"using": "css selector", "value": selector})
        return f"{self._base}/element/{found[_ELEMENT]}"

    def type(self, selector: str, text: str) -> None:
        self._call("POST", f"{self._element(selector)}/value", {"text": text})

    def click(self, selector: str) -> None:
        self._call("POST", f"{self._element(selector)}/click", {})

    def wait(self, script: str) -> Any:
        """The first value of a script that counts as true."""
        end = time.monotonic() + WAIT_S
        while not (value := self.run(script)):
            assert time.monotonic() < end, script
            time.sleep(0.05)
        return value

    def faults(self) -> list[str]:
        """What the page's console has of faults."""
        entries = self._call("POST", f"{self._base}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def close(self) -> None:
        self._http.delete(self._base)
        self._http.close()
        self._process.terminate()
        self._process.wait(WAIT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
