"""Unmodified coding agents against a running server: python agents.py http://127.0.0.1:PORT BIN [agent ...]

BIN is a folder with the agents' commands. Each is given a task in an empty folder and a home of its own; what is looked at is
that it got an answer from the model and met no refusal. Prints one line an agent and exits with 1 if one failed.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

BASE, BIN = sys.argv[1].rstrip("/"), pathlib.Path(sys.argv[2])
TASK = "Say hello."


def run(command, home, env, limit):
    work = home / "work"
    work.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=work, check=True)
    keep = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG", "TERM")}
    done = subprocess.run(
        command, cwd=work, env={**keep, "HOME": str(home), **env}, capture_output=True, text=True, timeout=limit,
        stdin=subprocess.DEVNULL,
    )
    return done


def codex(home):
    config = home / ".codex"
    config.mkdir()
    (config / "config.toml").write_text(
        'model = "muse"\nmodel_provider = "muser"\nmodel_context_window = 65536\n\n[model_providers.muser]\n'
        f'name = "muser"\nbase_url = "{BASE}/v1"\nwire_api = "responses"\nrequest_max_retries = 0\nstream_max_retries = 0\n'
    )
    done = run([BIN / "codex", "exec", "--json", "--skip-git-repo-check", TASK], home, {}, 600)
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    kinds = [event["type"] for event in events]
    failed = [event for event in events if event["type"] in ("error", "turn.failed")]
    assert not failed, failed
    assert "turn.completed" in kinds, (done.returncode, kinds, done.stderr[-2000:])
    return next(event["usage"] for event in events if event["type"] == "turn.completed")


def claude(home):
    env = {
        "ANTHROPIC_BASE_URL": BASE, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": "muse",
        "ANTHROPIC_SMALL_FAST_MODEL": "muse", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "200",
    }
    done = run([BIN / "claude", "-p", TASK, "--output-format", "json"], home, env, 600)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise AssertionError((done.returncode, done.stdout[-2000:], done.stderr[-2000:]))
    answer = answer[-1] if isinstance(answer, list) else answer
    # A turn that reached the output limit is the small model's doing; a refusal is not.
    text = str(answer.get("result"))
    refused = answer.get("is_error") and "output token maximum" not in text
    assert not refused and answer["usage"]["output_tokens"] > 0, answer
    return answer["usage"]


def opencode(home):
    config = home / ".config" / "opencode"
    config.mkdir(parents=True)
    models = {"muse": {"name": "muse", "limit": {"context": 65536, "output": 400}}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{BASE}/v1"}, "models": models}
    (config / "opencode.json").write_text(json.dumps({"provider": {"muser": provider}, "model": "muser/muse", "autoupdate": False}))
    done = run([BIN / "opencode", "run", TASK], home, {}, 600)
    assert done.returncode == 0 and "Error" not in done.stderr, (done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout.strip()[:60]


AGENTS = {"codex": codex, "claude": claude, "opencode": opencode}


def main():
    failed = 0
    for name in sys.argv[3:] or AGENTS:
        if not (BIN / name).exists():
            print(f"SKIPPED {name}: not installed", flush=True)
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
