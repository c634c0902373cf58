"""The page in headless Chromium: python page.py http://127.0.0.1:PORT FOLDER [PREFIX]

Drives chromedriver over its HTTP interface, asks a question, watches the answer stream, stops another one, and leaves
screenshots in FOLDER. With PREFIX (/llm, say) the browser sees the server through a proxy that answers below that path and
nowhere else. Exits with 1 if something is not as it should be.
"""

import base64
import http.client
import http.server
import os
import sys
import threading
import urllib.parse

from browser import Browser

PICTURE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../../models/muse-tiny-demo.jpg")
BASE, FOLDER = sys.argv[1].rstrip("/"), sys.argv[2]
PREFIX = sys.argv[3].rstrip("/") if len(sys.argv) > 3 else ""


class Proxy(http.server.BaseHTTPRequestHandler):
    """What nginx does with `location /llm/ { proxy_pass http://server/; proxy_buffering off; }`, and no more."""

    outside = []

    def log_message(self, *_):
        pass

    def forward(self):
        if not self.path.startswith(f"{PREFIX}/"):
            # Browsers ask for an icon by themselves.
            if self.path != "/favicon.ico":
                self.outside.append(self.path)
            self.send_error(404)
            return
        server = http.client.HTTPConnection(urllib.parse.urlparse(BASE).netloc, timeout=120)
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        kept = {name: value for name, value in self.headers.items() if name.lower() not in ("connection", "host")}
        server.request(self.command, self.path[len(PREFIX) :], body, {**kept, "X-Forwarded-Prefix": PREFIX})
        answer = server.getresponse()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            while piece := answer.read1(65536):
                self.wfile.write(piece)
                self.wfile.flush()
        except OSError:
            pass
        server.close()
        self.close_connection = True

    do_GET = do_POST = do_DELETE = forward


def through_proxy():
    proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{proxy.server_address[1]}{PREFIX}"


def main():
    with Browser(FOLDER) as browser:
        browser.open((through_proxy() if PREFIX else BASE) + "/")
        browser.wait("the model's name", "document.getElementById('model').textContent.includes('muse-tiny')")
        browser.picture("1-empty")
        busy = "!document.getElementById('stop').hidden"
        done = "document.getElementById('stop').hidden"

        browser.script("document.getElementById('effort').value = 'low'; document.getElementById('max').value = '160'")
        browser.type("#input", "Tell me a story about a fox.\ue007")
        browser.wait("streaming", f"{busy} && document.querySelector('.assistant .text').textContent.length + document.querySelector('.assistant details div').textContent.length > 20")
        browser.picture("2-streaming")
        browser.wait("the end", done, 60)
        browser.wait("figures", "/tokens\\/s/.test(document.querySelector('.assistant .meta').textContent)")
        folded = "const d = document.querySelector('.assistant details'); return d.hidden || !d.open"
        assert browser.script(folded), "reasoning is folded"
        browser.picture("3-answer")

        browser.script("document.getElementById('max').value = ''")
        # This story must not be over before it is stopped.
        browser.script(
            "window.plainFetch = window.fetch; window.fetch = (to, how) => {"
            " if (how && how.body && /completions/.test(to)) how = {...how, body: JSON.stringify({...JSON.parse(how.body), ignore_eos: true})};"
            " return window.plainFetch(to, how); }"
        )
        browser.type("#input", "Write a very long story.\ue007")
        browser.wait("streaming", f"{busy} && document.querySelectorAll('.assistant .text')[1].textContent.length + document.querySelectorAll('.assistant details div')[1].textContent.length > 10")
        browser.wait("a busy slot", "[...document.querySelectorAll('#slots li')].some(li => /reading|writing/.test(li.textContent))")
        browser.click("#stop")
        browser.wait("the stop", f"{done} && document.querySelectorAll('.assistant .meta')[1].textContent.includes('stopped')", 5)
        browser.script("window.fetch = window.plainFetch")
        browser.wait("idle slots", "[...document.querySelectorAll('#slots li')].every(li => li.textContent.includes('idle'))", 10)
        browser.picture("4-stopped")
        # Saved, forgotten, and loaded again.
        browser.type("#keep-name", "fox\ue007")
        browser.wait("the saving", "document.querySelectorAll('#sessions li').length === 1 && document.getElementById('kept-text').textContent.includes('kept')", 60)
        browser.click("#new")
        browser.wait("an empty log", "document.querySelectorAll('#log > *').length === 0")
        browser.click("#sessions button")
        browser.wait("the loading", "document.querySelectorAll('.user').length === 2 && document.getElementById('kept-text').textContent.includes('cached')", 60)
        assert browser.script("return document.querySelector('.user').textContent") == "Tell me a story about a fox."
        browser.picture("5-session")
        browser.script("document.querySelector('#sessions button:last-child').click()")
        browser.wait("the deleting", "document.querySelectorAll('#sessions li').length === 0", 10)
        # A picture dropped on the page is shown as a thumbnail, asked about, and stays in the log.
        browser.click("#new")
        browser.script("document.getElementById('effort').value = 'none'; document.getElementById('temperature').value = '0'")
        with open(PICTURE, "rb") as file:
            data = base64.b64encode(file.read()).decode()
        browser.script(
            f"const bytes = Uint8Array.from(atob('{data}'), c => c.charCodeAt(0));"
            "const files = new DataTransfer(); files.items.add(new File([bytes], 'scene.jpg', { type: 'image/jpeg' }));"
            "document.getElementById('chat').dispatchEvent(new DragEvent('drop', { dataTransfer: files, bubbles: true, cancelable: true }))"
        )
        loaded = "[...document.querySelectorAll('{0}')].filter(i => i.complete && i.naturalWidth === 140).length === {1}"
        browser.wait("the thumbnail", loaded.format("#images img", 1))
        browser.picture("6-dropped")
        # Pasted once more, and left out again.
        browser.script(
            f"const bytes = Uint8Array.from(atob('{data}'), c => c.charCodeAt(0));"
            "const files = new DataTransfer(); files.items.add(new File([bytes], 'scene.jpg', { type: 'image/jpeg' }));"
            "document.getElementById('input').dispatchEvent(new ClipboardEvent('paste', { clipboardData: files, bubbles: true, cancelable: true }))"
        )
        browser.wait("two thumbnails", loaded.format("#images img", 2))
        browser.script("document.querySelectorAll('#images button')[1].click()")
        browser.wait("one again", loaded.format("#images img", 1))
        browser.type("#input", "What color is the background?\ue007")
        browser.wait("the answer", f"{done} && document.querySelector('.assistant .meta').textContent.includes('50 of images')", 60)
        assert browser.script("return document.querySelector('.assistant .text').textContent") == "The background is orange."
        assert browser.script(f"return {loaded.format('.user img', 1)} && document.querySelectorAll('#images img').length === 0")
        browser.picture("7-seen")
        faults = browser.faults()
        assert not faults, faults
        assert not Proxy.outside, f"asked for beside the prefix: {Proxy.outside}"
        print("ok   page", PREFIX)


main()
