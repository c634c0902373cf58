#!/bin/sh
# Fetches the real vocabulary's ranks (Llama 4's tokenizer.model) out of a PyPI package into the test cache.
#
# It is not in the repository: it is large and has its own licence. Usage: fetch_vocab.sh CACHE_FOLDER
set -eu
cache=$1
sha=d0bdbaf59b0762c8c807617e2d8ea51420eb1b1de266df2495be755c8e0ed6ed
check() { echo "$sha  $1" | sha256sum -c - >/dev/null 2>&1; }
if check "$cache/llama4.tiktoken"; then exit 0; fi
mkdir -p "$cache"
temporary=$(mktemp -d "$cache/fetch.XXXXXX")
trap 'rm -rf "$temporary"' EXIT
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --retries 1 --timeout 20 \
    --dest "$temporary" llama-models==0.3.0
python3 - "$temporary" <<'PYTHON'
import glob, sys, zipfile
wheel, = glob.glob(sys.argv[1] + "/*.whl")
with zipfile.ZipFile(wheel) as archive, open(sys.argv[1] + "/ranks", "wb") as ranks:
    ranks.write(archive.read("llama_models/llama4/tokenizer.model"))
PYTHON
check "$temporary/ranks" || { echo "the fetched vocabulary has another SHA-256 than $sha" >&2; exit 1; }
# Atomic, since several tests may fetch at once.
mv "$temporary/ranks" "$cache/llama4.tiktoken"
