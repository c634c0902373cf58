#!/usr/bin/env python3
"""Decoding on a machine that has other work, too.

    busy.py MODEL MUSER [MUSER ...] [--loops 0,1,2] [--threads N] [--rounds N] [--tokens N] [--receipt NAME]

Beside so many loops that never rest: tokens a second of each executable through its server, all waits included (a median step would
not show the steps that lost their processor), and the processors that the scheduler leaves to `--threads` plain loops in its place, by
their processor time. `kept`: the rate over that without loops, divided by the same of the processors; 1 is a program that loses nothing
but the time it is not given. All of a round in turn; medians over rounds.
"""
import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import time
import urllib.request

LOOP = ["sh", "-c", "while :; do :; done"]


class Loops:
    def __init__(self, count):
        self.all = [subprocess.Popen(LOOP) for _ in range(count)]
        time.sleep(0.2)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for loop in self.all:
            loop.kill()
        for loop in self.all:
            loop.wait()

    def processor_seconds(self):
        ticks = 0
        for loop in self.all:
            fields = pathlib.Path(f"/proc/{loop.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


def processors(count, seconds=0.7):
    """That `count` plain loops have."""
    with Loops(count) as loops:
        begun, before = time.monotonic(), loops.processor_seconds()
        time.sleep(seconds)
        return (loops.processor_seconds() - before) / (time.monotonic() - begun)


class Server:
    def __init__(self, muser, model, threads):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = [muser, "serve", "-m", model, "--backend", "cpu", "--threads", str(threads), "--parallel", "1"]
        words += ["--draft", "off", "--port", str(port)]
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.url = f"http://127.0.0.1:{port}"
        for _ in range(400):
            time.sleep(0.05)
            try:
                urllib.request.urlopen(self.url + "/health").read()
                return
            except OSError:
                continue
        raise SystemExit(f"{muser} does not serve {model}")

    def rate(self, tokens):
        body = {"prompt": "Once", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        head = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(), head)
        begun = time.monotonic()
        usage = json.loads(urllib.request.urlopen(request).read())["usage"]
        return usage["completion_tokens"] / (time.monotonic() - begun)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("muser", nargs="+")
    parser.add_argument("--loops", default="0,1,2")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--receipt")
    args = parser.parse_args()
    loops = [int(count) for count in args.loops.split(",")]
    servers = [Server(muser, args.model, args.threads) for muser in args.muser]
    for server in servers:
        server.rate(args.tokens)
    rates, left = {}, {}
    for _ in range(args.rounds):
        for count in loops:
            with Loops(count):
                for at, server in enumerate(servers):
                    rates.setdefault((count, at), []).append(server.rate(args.tokens))
                left.setdefault(count, []).append(processors(args.threads))
    tests = []
    for count in loops:
        for at, muser in enumerate(args.muser):
            rate, part = statistics.median(rates[count, at]), statistics.median(left[count])
            test = {"test": f"{pathlib.Path(muser).name}, {count} loops", "tok_s": round(rate, 1)}
            test["reps"] = [round(rate, 1) for rate in rates[count, at]]
            test["processors"] = round(part, 3)
            if 0 in loops:
                quiet, whole = statistics.median(rates[0, at]), statistics.median(left[0])
                test["kept"] = round(rate / quiet / (part / whole), 3)
            print(json.dumps(test))
            tests.append(test)
    for server in servers:
        server.process.terminate()
    if args.receipt:
        words = [args.muser[0], "bench", "-m", args.model, "--backend", "cpu", "--prompt", "0", "--reps", "1", "--json"]
        report = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
        keep = ["engine", "commit", "device", "backend", "route", "repack", "model", "load_average", "date"]
        names = [pathlib.Path(muser).name for muser in args.muser]
        receipt = {
            "name": args.receipt,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": ["bench/busy.py", pathlib.Path(args.model).name, *names, "--loops", args.loops]
            + ["--threads", str(args.threads), "--rounds", str(args.rounds), "--tokens", str(args.tokens)],
            "commit": report["commit"],
            "tree": "modified",
            "withdrawn": None,
            "report": {key: report[key] for key in keep if key in report} | {"tests": tests},
        }
        pathlib.Path(f"receipts/{args.receipt}.json").write_text(json.dumps(receipt, indent=1) + "\n")


main()
