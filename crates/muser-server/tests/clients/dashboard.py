"""The dashboard in headless Chromium: python dashboard.py http://127.0.0.1:PORT FOLDER

Gives the server something to do, then looks at `/dashboard`: figures of that work, by keyboard, in both colour schemes, at the
width of a desk and of a phone, without a connection and with one again. An hour of history is put into the answers by the
browser, because nobody waits for one; everything else is the server's. Screenshots go to FOLDER. Exits with 1 if something is
not as it should be.
"""

import json
import sys
import time
import urllib.error
import urllib.request

from browser import Browser

BASE, FOLDER = sys.argv[1].rstrip("/"), sys.argv[2]
TAB, LEFT, HOME, END, ENTER = "\ue004", "\ue012", "\ue011", "\ue010", "\ue007"

# An hour, as busy days have it: steady, a burst with a queue and errors, a pause, and what goes on now.
AN_HOUR = """{
const plain = window.fetch;
const wave = (at, length) => Math.sin((2 * Math.PI * at) / length);
const hour = (columns) => Array.from({ length: 360 }, (_, at) => {
  const pause = at > 250 && at < 285, burst = at > 140 && at < 190;
  const load = pause ? 0 : burst ? 1.7 : 1 + 0.3 * wave(at, 90) + 0.08 * wave(at, 7);
  const row = { written: 92 * load, read: pause ? 0 : Math.max(0, 400 * load + 380 * wave(at, 23)), reused: 640 * load,
    first_p50: pause ? null : 0.21 + (burst ? 1.4 : 0.05 * load), first_p95: pause ? null : 0.6 + (burst ? 3.1 : 0.2 * load),
    next_p50: pause ? null : 0.031 * (0.8 + 0.2 * load), next_p95: pause ? null : 0.052 * (0.7 + 0.3 * load),
    running: pause ? 0 : Math.min(4, Math.round(3 * load)), waiting: burst ? Math.round(4 + 3 * wave(at, 25)) : 0,
    kv_used: 2e7 * load, kv_kept: 3e7 + 5e4 * at, accepted: pause ? null : 0.62 + 0.08 * wave(at, 50),
    bandwidth: pause ? null : 0.71 - 0.12 * wave(at, 23), errors: burst && at % 3 === 0 ? 4 : 0 };
  return columns.map((column) => row[column.id] ?? null);
});
window.fetch = async (to, how) => {
  if (window.noConnection) throw new TypeError("no connection");
  const response = await plain(to, how);
  if (!/v1\\/dashboard/.test(to) || !response.ok || !window.anHour) return response;
  const report = await response.json();
  const since = Number(/since=(\\d+)/.exec(to)?.[1] ?? 0);
  Object.assign(report.history, { first: since ? 361 : 1, newest: 360, rows: since ? [] : hour(report.history.columns) });
  const draft = [0.81, 0.66, 0.49, 0.33].map((share, at) => ({ place: at + 1, accepted_share: share }));
  report.draft.list = draft;
  report.nodes.list = [
    { name: "desk", connected: true, reads_for_us: true, round_trip_s: 0.0004, bytes_per_s: 1.1e9, fetching: 1, giving: 0, fault: null },
    { name: "cellar", connected: false, reads_for_us: true, round_trip_s: null, bytes_per_s: null, fetching: 0, giving: 0,
      fault: "10.0.0.7:7411: connection refused" },
  ];
  return new Response(JSON.stringify(report), { status: 200 });
};
}"""


def ask(path, body):
    data = json.dumps(body).encode()
    request = urllib.request.Request(BASE + path, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        return error.code


def work():
    """Answers of which the second reuses the first one's prompt, and requests that are refused."""
    question = {"role": "user", "content": "Tell me about the fox that went to the river. " * 40}
    body = {"messages": [question], "max_tokens": 24, "temperature": 0}
    for _ in range(2):
        answer = ask("/v1/chat/completions", body)
    assert ask("/v1/chat/completions", {**body, "temperature": -1}) == 400
    assert ask("/v1/nothing", {}) == 404
    return answer["usage"]


def emulate(browser, width, height, dark):
    phone = width < 500
    browser.devtools("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.devtools("Emulation.setScrollbarsHidden", hidden=True)
    browser.devtools("Emulation.setEmulatedMedia", features=[scheme])


def figure(name):
    return f"(document.querySelector('[data-figure={name}]')?.textContent ?? '')"


def has_work(browser, usage):
    """What was done is there, by the server's own figures."""
    browser.wait("tokens written", f"/^4[0-9] tokens/.test({figure('written_tokens')})")
    assert browser.script(f"return {figure('answers')}") == "2"
    reused = browser.script(f"return {figure('reused_tokens')}")
    assert reused == f"{usage['prompt_tokens_details']['cached_tokens']} tokens", (reused, usage)
    assert browser.script(f"return {figure('errors')}") == "2"
    rows = browser.script("return [...document.querySelectorAll('#cards tbody td.code')].map(cell => cell.textContent)")
    assert "invalid_value" in rows and len(rows) == 2, rows
    assert browser.script("return document.getElementById('state').textContent") == "ready"
    # The memory was idle, so it has been measured by the next look.
    browser.wait("the memory's rate", f"/GB.s$/.test({figure('bandwidth')})", 20)
    # Every figure has its mark: as many as there are values, and words, not only colours.
    marks = browser.script("return [...document.querySelectorAll('.rows > div')].map(row => row.querySelector('.mark')?.textContent)")
    assert len(marks) > 40 and set(marks) == {"measured", "derived", "estimated"}, marks


def by_keyboard(browser):
    """Everything is reached with Tab, and a chart says its values to screen readers."""
    browser.script("document.activeElement.blur()")
    seen = []
    for _ in range(60):
        browser.press(TAB)
        seen.append(browser.script("const e = document.activeElement; return e.getAttribute('aria-label') ?? e.textContent"))
        if "Every figure in a sentence" in seen[-1]:
            break
    for wanted in ("Chat", "10 min", "1 hour", "Tokens written, over time", "Requests refused, over time", "As a table"):
        assert wanted in seen, (wanted, seen)
    chart = "document.querySelector('[aria-label=\"Tokens written, over time\"]')"
    browser.script(f"{chart}.focus()")
    browser.press(HOME)
    oldest = browser.script(f"return {chart}.getAttribute('aria-valuetext')")
    assert oldest.startswith("60 min ago: Written ") and oldest.endswith("tokens/s"), oldest
    browser.press(END, LEFT, LEFT, LEFT)
    assert browser.script(f"return {chart}.getAttribute('aria-valuetext')").startswith("30 s ago: Written ")
    assert browser.script(f"return {chart}.parentElement.querySelector('.readout').textContent").startswith("30 s ago")
    browser.script("document.querySelector('[data-minutes=\"10\"]').focus()")
    browser.press(ENTER)
    browser.press(TAB)
    assert browser.script("return document.querySelector('[data-minutes=\"10\"]').getAttribute('aria-pressed')") == "true"
    browser.script(f"{chart}.focus()")
    browser.press(HOME)
    assert browser.script(f"return {chart}.getAttribute('aria-valuetext')").startswith("10 min ago: ")
    # The table of a chart is opened by keyboard and has a row for each minute.
    browser.script(f"{chart}.parentElement.querySelector('summary').focus()")
    browser.press(ENTER)
    browser.wait("the table", f"{chart}.parentElement.querySelectorAll('tbody tr').length === 10")
    browser.press(ENTER)
    browser.click("[data-minutes='60']")


def fits(browser, width):
    """Nothing is wider than the window."""
    wide = f"[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > {width} + 0.5 && !e.closest('.scroll'))"
    found = browser.script(f"return {wide}.map(e => e.tagName + '.' + e.className + ' ' + e.textContent.slice(0, 40))")
    assert not found, found
    assert browser.script("return window.innerWidth") == width
    assert browser.script("return document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"


def main():
    usage = work()
    with Browser(FOLDER, (1280, 900)) as browser:
        browser.devtools("Page.addScriptToEvaluateOnNewDocument", source=AN_HOUR)
        emulate(browser, 1280, 900, dark=False)
        browser.open(BASE + "/")
        browser.click("header a")
        has_work(browser, usage)
        browser.whole_page("1-just-started")
        browser.devtools("Page.addScriptToEvaluateOnNewDocument", source="window.anHour = true")
        browser.open(BASE + "/dashboard")
        browser.wait("an hour", "document.querySelectorAll('path.line').length > 12")
        for name, width, height, dark in [
            ("2-light", 1280, 900, False),
            ("3-dark", 1280, 900, True),
            ("4-phone-light", 360, 740, False),
            ("5-phone-dark", 360, 740, True),
        ]:
            emulate(browser, width, height, dark)
            # Charts are drawn anew for their new width.
            time.sleep(0.5)
            fits(browser, width)
            browser.whole_page(name)
            page = browser.script("return getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, page[4:-1].split(","))) < 200) == dark, (page, dark)
        emulate(browser, 1280, 900, dark=False)
        by_keyboard(browser)
        browser.script("window.noConnection = true")
        browser.wait("the loss", "document.getElementById('state').textContent === 'away' && !document.getElementById('notice').hidden", 10)
        browser.picture("6-away")
        browser.script("window.noConnection = false")
        browser.wait("the return", "document.getElementById('state').textContent === 'ready' && document.getElementById('notice').hidden", 10)
        assert not browser.script("return document.body.innerText.includes('the river')"), "no prompt is shown"
        faults = browser.faults()
        assert not faults, faults
        print("ok   dashboard")


main()
