#!/usr/bin/env python3
"""Makes tests/data/corpus-hashes.txt with the Python package `tokenizers` (0.23), which shares no code with muser-text.

First: cargo test -p muser-text --test corpus -- --ignored write_oracle_input
Then:  python3 corpus_oracle.py CACHE_FOLDER/oracle > data/corpus-hashes.txt
"""
import hashlib
import pathlib
import struct
import sys

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

PATTERN = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])


def load(folder, name):
    tokens = (folder / f"{name}.tokens").read_text(encoding="utf-8").split("\n")
    merges = [tuple(line.split(" ")) for line in (folder / f"{name}.merges").read_text(encoding="utf-8").split("\n")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    return tokenizer


def main():
    folder = pathlib.Path(sys.argv[1])
    for name in ["tiny", "real"]:
        tokenizer = load(folder, name)
        for path in sorted(folder.glob("*.section")):
            data = path.read_bytes()
            ids = tokenizer.encode(data.decode("utf-8"), add_special_tokens=False).ids
            packed = struct.pack(f"<{len(ids)}I", *ids)
            print(name, path.stem, hashlib.sha256(data).hexdigest(), len(ids), hashlib.sha256(packed).hexdigest())


main()
