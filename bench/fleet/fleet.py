"""A gateway of another program in front of three `muser serve` with one pack store: conversations go on while one server is
killed and another one starts. Says as JSON which share of prompt tokens was cached, and fails where that is far below what was
said before or where a client would see a failure twice.

    python3 bench/fleet/fleet.py --muser target/release/muser --gateway smg --python VENV/bin/python

Gateways: vllm-router, smg, sglang-router (from PyPI, each best in a virtual environment of its own: two of them install a
command of the same name), haproxy. `--packs` is a folder (default: a fresh one) or s3://BUCKET/PREFIX.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

TURNS = 6
WORDS = "river stone amber field north candle paper winter engine garden mirror signal copper island thread".split()


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Server:
    def __init__(self, muser, home, packs, port=None):
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        args = [muser, "serve", "--port", str(self.port), f"--packs={packs}", "--threads", "1", "--ctx", "4096",
                "--backend", "cpu", "--name", "tiny"]
        env = {**os.environ, "MUSER_HOME": str(home)}
        self.process = subprocess.Popen(args, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def wait(self):
        wait_for(f"{self.url}/health", self.process)
        return self

    def kill(self):
        self.process.kill()
        self.process.wait()


def wait_for(url, process, seconds=90):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SystemExit(f"{process.args[0]} ended with {process.returncode} before {url} answered")
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.1)
    raise SystemExit(f"{url} does not answer")


def haproxy_config(port, servers):
    # The hash is of the body's first kilobyte, which a conversation's turns share: the same server, as long as it is there.
    lines = ["defaults", " mode http", " timeout connect 2s", " timeout client 120s", " timeout server 120s", " retries 2",
             " option redispatch", " retry-on conn-failure empty-response", "frontend all", f" bind 127.0.0.1:{port}",
             " option http-buffer-request", " default_backend servers", "backend servers",
             " balance hash req.body,bytes(0,1024)", " hash-type consistent", " option httpchk GET /health"]
    lines += [f" server s{index} {server.url[7:]} check inter 500 fall 1 rise 1" for index, server in enumerate(servers)]
    return "\n".join(lines) + "\n"


def gateway(args, servers, folder, port):
    urls = [server.url for server in servers]
    common = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls, "--prometheus-port", str(free_port())]
    health = ["--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--health-success-threshold", "1"]
    policy = ["--policy", args.policy or "cache_aware"]
    bin = pathlib.Path(args.python).parent if args.python else pathlib.Path()
    if args.gateway == "haproxy":
        config = folder / "haproxy.cfg"
        config.write_text(haproxy_config(port, servers))
        command = [args.haproxy, "-db", "-f", str(config)]
    elif args.gateway == "smg":
        command = [args.python, "-m", "smg", "launch", *common, *policy, *health]
    elif args.gateway == "sglang-router":
        command = [args.python, "-m", "sglang_router.launch_router", *common, *policy, *health]
    else:
        command = [str(bin / "vllm-router"), *common, *policy, *health]
    log = open(folder / "gateway.log", "w")
    return subprocess.Popen(command, stdout=log, stderr=log)


class Talk:
    """A conversation, whose beginning is its own."""

    def __init__(self, number, url):
        words = [WORDS[(number * 7 + place * (number + 3)) % len(WORDS)] for place in range(500)]
        self.url = url
        self.messages = [{"role": "system", "content": f"Conversation {number}. " + " ".join(words)}]
        self.before = 0
        self.prompt = self.cached = self.reckoned = 0
        self.retried = self.failed = 0

    def turn(self, number):
        self.messages.append({"role": "user", "content": f"Question {number}: what follows?"})
        answer = None
        for attempt in range(2):
            try:
                answer = self.ask()
                break
            except (urllib.error.URLError, OSError, ValueError) as fault:
                if attempt:
                    self.failed += 1
                    print(f"failed twice: {fault}", file=sys.stderr)
                else:
                    self.retried += 1
                    time.sleep(1.5)
        if answer is None:
            self.messages.pop()
            return
        usage = answer["usage"]
        if self.before:
            self.prompt += usage["prompt_tokens"]
            self.cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            self.reckoned += self.before
        self.before = usage["prompt_tokens"]
        self.messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or "-"})

    def ask(self):
        body = {"model": "tiny", "messages": self.messages, "max_tokens": 12, "temperature": 0}
        asked = urllib.request.Request(f"{self.url}/v1/chat/completions", json.dumps(body).encode(),
                                       {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=120) as answer:
            return json.load(answer)


def shares(talks):
    prompt, cached, reckoned = (sum(getattr(talk, name) for talk in talks) for name in ("prompt", "cached", "reckoned"))
    for talk in talks:
        talk.prompt = talk.cached = talk.reckoned = 0
    return {"prompt_tokens": prompt, "cached_share": round(cached / max(prompt, 1), 4),
            "reckoned_share": round(reckoned / max(prompt, 1), 4)}


def run(args, folder, living):
    packs = args.packs or folder / "packs"
    homes = [folder / f"home{index}" for index in range(4)]
    key = folder / "home0" / "keys"
    servers = []
    for home in homes[:3]:
        home.mkdir()
        # One store has one key: the first server makes it, the others have a copy.
        if home is not homes[0]:
            subprocess.run(["cp", "-r", str(key), str(home)], check=True)
        servers.append(Server(args.muser, home, packs).wait())
        living.append(servers[-1].process)
    port = free_port()
    front = gateway(args, servers, folder, port)
    living.append(front)
    url = f"http://127.0.0.1:{port}"
    wait_for(f"{url}/v1/models", front)
    talks = [Talk(number, url) for number in range(args.talks)]
    pool = concurrent.futures.ThreadPoolExecutor(4)
    report = {"gateway": args.gateway, "talks": args.talks, "turns": TURNS}

    def turns(numbers):
        for number in numbers:
            list(pool.map(lambda talk: talk.turn(number), talks))

    turns(range(3))
    report["before"] = shares(talks)
    # What is to be kept lies in the store a few seconds after it was computed.
    time.sleep(4)
    servers[0].kill()
    turns([3])
    report["one_killed"] = shares(talks)
    living.append(Server(args.muser, homes[0], packs, servers[0].port).wait().process)
    time.sleep(3)
    turns([4, 5])
    report["one_back"] = shares(talks)
    report["retried"] = sum(talk.retried for talk in talks)
    report["failed_twice"] = sum(talk.failed for talk in talks)
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--muser", required=True)
    parser.add_argument("--gateway", required=True, choices=["vllm-router", "smg", "sglang-router", "haproxy"])
    parser.add_argument("--python", default=sys.executable, help="of the environment that has the gateway")
    parser.add_argument("--haproxy", default="haproxy")
    parser.add_argument("--policy", help="instead of cache_aware")
    parser.add_argument("--packs")
    parser.add_argument("--talks", type=int, default=12)
    args = parser.parse_args()
    living = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            report = run(args, pathlib.Path(folder), living)
        finally:
            for process in living:
                process.send_signal(signal.SIGTERM)
            for process in living:
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
            if sys.exc_info()[0] is not None:
                print((pathlib.Path(folder) / "gateway.log").read_text()[-2000:] if living else "", file=sys.stderr)
    print(json.dumps(report))
    enough = all(report[part]["cached_share"] >= 0.9 * report[part]["reckoned_share"] for part in ("before", "one_back"))
    if not enough or report["failed_twice"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
