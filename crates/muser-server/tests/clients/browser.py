"""Headless Chromium, driven through chromedriver's HTTP interface with what Python has."""

import base64
import json
import socket
import subprocess
import time
import urllib.request

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Browser:
    """A window of its own; screenshots go to a folder."""

    def __init__(self, folder, size=(1200, 800)):
        self.folder, self.size = folder, size

    def __enter__(self):
        port = free_port()
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.driver = subprocess.Popen(["chromedriver", f"--port={port}"], **quiet)
        self.root = f"http://127.0.0.1:{port}"
        for _ in range(100):
            try:
                urllib.request.urlopen(f"{self.root}/status", timeout=1)
                break
            except OSError:
                time.sleep(0.1)
        size = "--window-size={},{}".format(*self.size)
        options = {"args": ["--headless=new", "--no-sandbox", "--disable-gpu", size]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        body = {"capabilities": {"alwaysMatch": wanted}}
        self.session = f"{self.root}/session/{self.call('POST', '/session', body, '')['sessionId']}"
        return self

    def __exit__(self, *_):
        try:
            self.call("DELETE", "")
        finally:
            self.driver.terminate()

    def call(self, method, path, body=None, root=None):
        data = None if body is None else json.dumps(body).encode()
        address = f"{self.root if root == '' else self.session}{path}"
        request = urllib.request.Request(address, data, {"content-type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["value"]

    def devtools(self, command, **params):
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def open(self, url):
        self.call("POST", "/url", {"url": url})

    def find(self, selector):
        return self.call("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]

    def script(self, text):
        return self.call("POST", "/execute/sync", {"script": text, "args": []})

    def type(self, selector, text):
        self.call("POST", f"/element/{self.find(selector)}/value", {"text": text})

    def press(self, *keys):
        """Presses keys one after the other, wherever the focus is."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def click(self, selector):
        self.call("POST", f"/element/{self.find(selector)}/click", {})

    def wait(self, what, expression, seconds=30):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.script(f"return {expression}"):
                return
            time.sleep(0.05)
        self.picture("failed")
        raise AssertionError(f"{what} did not happen within {seconds} s")

    def picture(self, name):
        with open(f"{self.folder}/{name}.png", "wb") as file:
            file.write(base64.b64decode(self.call("GET", "/screenshot")))

    def whole_page(self, name):
        """All of the page, however long."""
        shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=True)
        with open(f"{self.folder}/{name}.png", "wb") as file:
            file.write(base64.b64decode(shot["data"]))

    def faults(self):
        """What the browser's console has of errors."""
        return [entry for entry in self.call("POST", "/se/log", {"type": "browser"}) if entry["level"] == "SEVERE"]
