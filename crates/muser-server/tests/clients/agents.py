"""Unmodified coding agents against a running server: python agents.py http://127.0.0.1:PORT BIN [agent ...]

BIN is a folder with the agents' commands. Each is given a task in an empty folder and a home of its own. It must end well,
without a refusal. The small model calls no tool by itself, so between agent and server stands a proxy that asks for one
harmless call with `tool_choice` in the first request that offers its tool, and changes nothing else. The agent then has to
run the call and send its result back. Prints one line an agent and exits with 1 if one failed.
"""

import contextlib
import http.client
import http.server
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse

SERVER, BIN = urllib.parse.urlsplit(sys.argv[1]), pathlib.Path(sys.argv[2])
TASK = "Say hello."
LIMIT_SECONDS = 600


class Forcing:
    """A proxy that has one tool called, once, and keeps what was said."""

    def __init__(self, tool, choice):
        self.tool, self.choice = tool, choice
        self.forced = False
        self.bodies, self.refusals = [], []
        self.lock = threading.Lock()

    def change(self, body):
        with self.lock:
            self.bodies.append(body)
            names = [tool.get("name") or tool.get("function", {}).get("name") for tool in body.get("tools") or []]
            if self.forced or self.tool not in names:
                return body
            self.forced = True
            return {**body, "tool_choice": self.choice}

    def handler(forcing):
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def pass_on(self):
                data = self.rfile.read(int(self.headers.get("content-length") or 0))
                if data and self.command == "POST":
                    data = json.dumps(forcing.change(json.loads(data))).encode()
                kept = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "content-length", "accept-encoding")}
                upstream = http.client.HTTPConnection(SERVER.hostname, SERVER.port, timeout=LIMIT_SECONDS)
                upstream.request(self.command, self.path, data or None, kept)
                answer = upstream.getresponse()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                        self.send_header(name, value)
                self.send_header("connection", "close")
                self.end_headers()
                told = b""
                while piece := answer.read1(65536):
                    told += piece
                    self.wfile.write(piece)
                    self.wfile.flush()
                if answer.status >= 400:
                    forcing.refusals.append((self.path, answer.status, told[:600].decode(errors="replace")))
                self.close_connection = True

            do_GET = do_POST = do_HEAD = pass_on

        return Handler

    @contextlib.contextmanager
    def serve(self):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()

    def check(self, is_result):
        assert not self.refusals, self.refusals
        assert self.forced, f"no request offered {self.tool}"
        assert any(is_result(body) for body in self.bodies), f"the result of {self.tool} was not sent back"


def run(command, home, env):
    work = home / "work"
    work.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=work, check=True)
    keep = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG", "TERM")}
    return subprocess.run(
        command, cwd=work, env={**keep, "HOME": str(home), **env}, capture_output=True, text=True, timeout=LIMIT_SECONDS,
        stdin=subprocess.DEVNULL,
    )


def codex(home):
    config = home / ".codex"
    config.mkdir()
    forcing = Forcing("get_goal", {"type": "function", "name": "get_goal"})
    with forcing.serve() as base:
        (config / "config.toml").write_text(
            'model = "muse"\nmodel_provider = "muser"\nmodel_context_window = 65536\n\n[model_providers.muser]\n'
            f'name = "muser"\nbase_url = "{base}/v1"\nwire_api = "responses"\nrequest_max_retries = 0\nstream_max_retries = 0\n'
        )
        done = run([BIN / "codex", "exec", "--json", "--skip-git-repo-check", TASK], home, {})
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    failed = [event for event in events if event["type"] in ("error", "turn.failed")]
    assert not failed and done.returncode == 0, (done.returncode, failed, done.stderr[-2000:])
    ended = [event for event in events if event["type"] == "turn.completed"]
    assert ended, (events, done.stderr[-2000:])
    forcing.check(lambda body: any(item.get("type") == "function_call_output" for item in body.get("input") or []))
    return ended[-1]["usage"]


def claude(home):
    forcing = Forcing("TaskList", {"type": "tool", "name": "TaskList"})
    with forcing.serve() as base:
        env = {
            "ANTHROPIC_BASE_URL": base, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": "muse",
            "ANTHROPIC_SMALL_FAST_MODEL": "muse", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "300",
        }
        done = run([BIN / "claude", "-p", TASK, "--output-format", "json"], home, env)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise AssertionError((done.returncode, done.stdout[-2000:], done.stderr[-2000:])) from None
    answer = answer[-1] if isinstance(answer, list) else answer
    # A small model does not always find an end: then the agent says that the limit was reached, and that it is an error.
    reached = "output token maximum" in str(answer.get("result"))
    assert reached or (done.returncode == 0 and not answer.get("is_error")), answer
    assert answer["usage"]["output_tokens"] > 0, answer
    is_result = lambda part: isinstance(part, dict) and part.get("type") == "tool_result"  # noqa: E731
    parts = lambda body: (part for m in body.get("messages") or [] if isinstance(m["content"], list) for part in m["content"])  # noqa: E731
    forcing.check(lambda body: any(is_result(part) for part in parts(body)))
    return answer["usage"]


def opencode(home):
    config = home / ".config" / "opencode"
    config.mkdir(parents=True)
    models = {"muse": {"name": "muse", "limit": {"context": 65536, "output": 400}}}
    # It has no tool without a string, and what the small model writes there is often cut or nonsense: then the result that is
    # sent back says so.
    forcing = Forcing("glob", {"type": "function", "function": {"name": "glob"}})
    with forcing.serve() as base:
        provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{base}/v1"}, "models": models}
        settings = {"provider": {"muser": provider}, "model": "muser/muse", "autoupdate": False}
        (config / "opencode.json").write_text(json.dumps(settings))
        done = run([BIN / "opencode", "run", TASK], home, {})
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    forcing.check(lambda body: any(message.get("role") == "tool" for message in body.get("messages") or []))
    return done.stdout.strip()[:60]


AGENTS = {"codex": codex, "claude": claude, "opencode": opencode}


def main():
    failed = 0
    for name in sys.argv[3:] or AGENTS:
        if not (BIN / name).exists():
            print(f"FAIL {name}: not installed", flush=True)
            failed += 1
            continue
        home = pathlib.Path(tempfile.mkdtemp())
        began = time.monotonic()
        try:
            told = AGENTS[name](home)
            print(f"ok   {name} {time.monotonic() - began:.0f} s {told}", flush=True)
        except Exception as fault:  # noqa: BLE001 - any fault of an agent is a failed one
            failed += 1
            print(f"FAIL {name}: {type(fault).__name__}: {fault}", flush=True)
        finally:
            shutil.rmtree(home, ignore_errors=True)
    sys.exit(1 if failed else 0)


main()
