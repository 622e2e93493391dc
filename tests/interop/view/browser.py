"""Debian's Chromium without a window, through its driver: the few calls of WebDriver that tests need."""

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

DRIVER = shutil.which("chromedriver")
CHROMIUM = shutil.which("chromium")
KEYS = {"left": "\ue012", "up": "\ue013", "right": "\ue014", "down": "\ue015", "enter": "\ue007"}
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """A window of 1280 by 1000 pixels. `close` ends it."""

    def __init__(self) -> None:
        assert DRIVER and CHROMIUM
        self._driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self._driver.stdout
        port = ""
        for line in self._driver.stdout:
            if "started successfully on port" in line:
                port = line.split("port ")[1].strip(". \n")
                break
        self._url = f"http://127.0.0.1:{port}/session"
        options = {"binary": CHROMIUM, "args": [*FLAGS, "--window-size=1280,1000"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._url += "/" + self._post("", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End browser and driver."""
        try:
            self._call("DELETE", "", None)
        finally:
            self._driver.terminate()
            self._driver.wait()
            assert self._driver.stdout
            self._driver.stdout.close()

    def _call(self, method: str, path: str, data: Any) -> Any:
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(self._url + path, body, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()[:600]) from None

    def _post(self, path: str, data: Any) -> Any:
        return self._call("POST", path, data)

    def open(self, address: str) -> None:
        """Go to a page, and wait until it has loaded."""
        self._post("/url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        """The result of JavaScript."""
        return self._post("/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, condition: str, seconds: float = 60) -> Any:
        """Wait until an expression of JavaScript is true. AssertionError if it does not come true."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if found := self.run(f"return {condition}"):
                return found
            time.sleep(0.05)
        raise AssertionError(f"not true after {seconds} s: {condition}")

    def _found(self, selector: str) -> str:
        found: str = self._post("/element", {"using": "css selector", "value": selector})[_ELEMENT]
        return found

    def click(self, selector: str) -> None:
        """Click the first element of a CSS selector."""
        self._post(f"/element/{self._found(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Type into an element."""
        self._post(f"/element/{self._found(selector)}/value", {"text": text})

    def press(self, *names: str) -> None:
        """Press keys, of `KEYS`, where the focus is."""
        steps = [{"type": kind, "value": KEYS[name]} for name in names for kind in ("keyDown", "keyUp")]
        self._post("/actions", {"actions": [{"type": "key", "id": "keys", "actions": steps}]})

    def prefer(self, scheme: str) -> None:
        """Have pages find that the user prefers "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._post("/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}})

    def names(self) -> list[tuple[str, str]]:
        """The role and the name of each element that a screen reader reads."""
        self._post("/goog/cdp/execute", {"cmd": "Accessibility.enable", "params": {}})
        nodes = self._post("/goog/cdp/execute", {"cmd": "Accessibility.getFullAXTree", "params": {}})["nodes"]
        return [
            (each["role"]["value"], each.get("name", {}).get("value", "")) for each in nodes if not each.get("ignored")
        ]

    def messages(self) -> list[str]:
        """The messages in the console since the last call."""
        return [each["message"] for each in self._post("/se/log", {"type": "browser"})]

    def screenshot(self, path: Path) -> None:
        """Save a picture of the whole page."""
        size = self.run("return [document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
        asked = {"cmd": "Page.captureScreenshot", "params": {"captureBeyondViewport": True, "clip": clip}}
        path.write_bytes(base64.b64decode(self._post("/goog/cdp/execute", asked)["data"]))
