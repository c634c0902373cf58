"""lm-eval, unmodified and offline, on tasks of our own: python likelihoods.py http://127.0.0.1:PORT

Its log-likelihoods come from prompts that are read in chunks. Each is compared with what decoding says: every token of a
continuation by itself, as the one token after what stands before it. Exits with 1 if a value differs.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import urllib.request

BASE = sys.argv[1].rstrip("/")
HERE = pathlib.Path(__file__).parent
TASKS = ["muser_choice", "muser_rolling", "muser_generate"]


def call(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(BASE + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def encode(text):
    return call("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]


def decoded(before, token):
    """What decoding gives a token after others, and whether it is the likeliest."""
    body = {"prompt": [before], "max_tokens": 1, "logprobs": 1, "temperature": 0, "logit_bias": {str(token): 1000}}
    logprobs = call("/v1/completions", body)["choices"][0]["logprobs"]
    value = logprobs["token_logprobs"][0]
    return value, value == max(logprobs["top_logprobs"][0].values())


def likelihood(before, tokens):
    values = [decoded(before + tokens[:at], token) for at, token in enumerate(tokens)]
    return sum(value for value, _ in values), all(greedy for _, greedy in values)


def run(folder):
    for task in TASKS:
        text = (HERE / f"{task}.yaml").read_text().replace("DATA", str(HERE))
        (folder / f"{task}.yaml").write_text(text)
    arguments = f"model=muse-tiny,base_url={BASE}/v1/completions,tokenizer_backend=remote,num_concurrent=4,max_retries=1"
    command = [
        pathlib.Path(sys.executable).with_name("lm_eval"), "--model", "local-completions", "--tasks", ",".join(TASKS),
        "--include_path", folder, "--model_args", arguments, "--log_samples", "--output_path", folder / "out",
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home"), "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def samples(folder, task):
    (file,) = (folder / "out").rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def check_choices(folder):
    compared = 0
    for sample in samples(folder, "muser_choice"):
        for arguments, (response,) in zip(sample["arguments"].values(), sample["resps"], strict=True):
            context, continuation = arguments["arg_0"], arguments["arg_1"]
            before = encode(context)
            tokens = encode(context + continuation)[len(before):]
            value, greedy = likelihood(before, tokens)
            assert (float(response[0]), response[1] == "True") == (value, greedy), (context, continuation, response, value, greedy)
            compared += len(tokens)
    return compared


def check_rolling(folder):
    prefix = encode(call("/tokenizer_info")["bos_token"])[:1]
    compared = 0
    for sample in samples(folder, "muser_rolling"):
        tokens = encode(sample["doc"]["text"])
        value, _ = likelihood(prefix, tokens)
        ((response,),) = sample["resps"]
        assert float(response) == value, (sample["doc"]["text"], response, value)
        compared += len(tokens)
    return compared


def check_generated(folder):
    for sample in samples(folder, "muser_generate"):
        ((text,),) = sample["resps"]
        body = {"prompt": encode(sample["doc"]["text"]), "max_tokens": 24, "temperature": 0, "stop": ["."]}
        assert text == call("/v1/completions", body)["choices"][0]["text"], text


def main():
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        run(folder)
        compared = check_choices(folder) + check_rolling(folder)
        check_generated(folder)
        print(f"ok   lm-eval: {compared} log-probabilities are those of decoding", flush=True)


main()
