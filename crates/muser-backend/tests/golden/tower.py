#!/usr/bin/env python3
"""Rows of a vision tower in f64, from a projector file: what `tests/tower.rs` compares with.

    tower.py OUT.safetensors NAME=PROJECTOR.gguf ...

Written from the GGUF side (pairs interleaved, temporal slabs summed, windows as a mask) and equal to transformers 5.24.0 with
every operation in f64 to 4e-13 on a random tower with several windows, for both position rules. Per name and picture:
  NAME.ROWSxCOLS.RULE  f32 [tokens, width / 4]  every fourth value of the rows before the weightless norm
Pictures are ROWSxCOLS tokens of bytes (i * 2654435761 >> 13) & 255. `cargo test -p muser-backend --test tower -- --ignored write`
writes the projectors to $MUSER_TOWER_DIR. Needs numpy, safetensors, gguf.
"""
import math, sys
import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file

erf = np.vectorize(math.erf, otypes=[np.float64])
gelu = lambda x: x * 0.5 * (1 + erf(x * math.sqrt(0.5)))
SIZES = [(1, 1), (4, 3), (1, 5), (5, 7)]


def load(path):
    r, w = GGUFReader(path), {}
    for t in r.tensors:
        w[t.name] = dequantize(t.data, t.tensor_type).reshape([int(d) for d in t.shape[::-1]]).astype(np.float64)
    return w, lambda k: r.fields[k].contents()


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def turn(x, a):
    """Rotates the pairs (0, 1), (2, 3), ... of x [n, heads, d] by the angles a [n, d / 2]."""
    c, s, y = np.cos(a)[:, None], np.sin(a)[:, None], np.empty_like(x)
    y[..., 0::2], y[..., 1::2] = x[..., 0::2] * c - x[..., 1::2] * s, x[..., 0::2] * s + x[..., 1::2] * c
    return y


def tower(w, key, rgb, rule):
    """Rows before the norm of a resampled picture u8 [H, W, 3]."""
    v = lambda n: key("clip.vision." + n)
    p, heads, eps = v("patch_size"), v("attention.head_count"), v("attention.layer_norm_epsilon")
    side = v("image_size") // (p * v("spatial_merge_size"))
    h, wd = rgb.shape[0] // p, rgb.shape[1] // p
    norm = lambda x, n: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * w[n + ".weight"] + w[n + ".bias"]
    lin = lambda x, n: x @ w[n + ".weight"].T + w[n + ".bias"]
    value = (rgb.astype(np.float32) - np.float32(127.5)) / np.float32(127.5)
    x = value.astype(np.float64).reshape(h, p, wd, p, 3).transpose(0, 2, 4, 1, 3).reshape(h * wd, -1)
    x = x @ w["v.patch_embd.weight"].reshape(-1, 3 * p * p).T
    table, n = w["v.position_embd.weight"].reshape(side, side, -1), h * wd
    for i in range(n):
        y, c, ny, nc = (i // wd, i % wd, h, wd) if rule == "raster" else (i // h, i % h, wd, h)
        sy, sc = (y + 0.5) * side / ny - 0.5, (c + 0.5) * side / nc - 0.5
        for ty in (math.floor(sy), math.floor(sy) + 1):
            for tc in (math.floor(sc), math.floor(sc) + 1):
                if 0 <= ty < side and 0 <= tc < side:
                    x[i] += (1 - abs(sy - ty)) * (1 - abs(sc - tc)) * table[ty, tc]
    x = norm(x, "v.pre_ln")
    y, c = np.divmod(np.arange(n), wd)
    window = (y // side) * 1000 + c // side
    d = x.shape[1] // heads
    f = 10000.0 ** (-np.arange(0, d // 2, 2) / (d // 2))
    a = np.concatenate([(c[:, None] + 1) * f, (y[:, None] + 1) * f], 1)
    split = lambda x: x.reshape(n, heads, d)
    for i in range(v("block_count")):
        b = f"v.blk.{i}."
        seen = (i + 1) % 4 == 0 or i == v("block_count") - 1 or window[:, None] == window
        z = norm(x, b + "ln1")
        q, k = (turn(split(lin(z, b + t)), a) for t in ("attn_q", "attn_k"))
        s = np.einsum("ihd,jhd->hij", q, k) * d ** -0.5
        o = np.einsum("hij,jhd->ihd", softmax(np.where(seen, s, -np.inf)), split(lin(z, b + "attn_v"))).reshape(n, -1)
        x = x + lin(o, b + "attn_out")
        x = x + lin(gelu(lin(norm(x, b + "ln2"), b + "ffn_up")), b + "ffn_down")
    x = norm(x, "v.post_ln")
    x = x.reshape(h // 2, 2, wd // 2, 2, -1).transpose(0, 2, 4, 1, 3).reshape(n // 4, -1)
    return gelu(gelu(x @ w["mm.0.weight"].T) @ w["mm.1.weight"].T) @ w["mm.2.weight"].T


out = {}
for name, path in (a.split("=") for a in sys.argv[2:]):
    w, key = load(path)
    for rows, cols in SIZES:
        i = np.arange(rows * cols * 28 * 28 * 3, dtype=np.uint64)
        rgb = ((i * 2654435761 >> 13) & 255).astype(np.uint8).reshape(rows * 28, cols * 28, 3)
        for rule in ("raster", "reference"):
            if rule == "raster" or rows != cols:
                out[f"{name}.{rows}x{cols}.{rule}"] = np.ascontiguousarray(tower(w, key, rgb, rule)[:, ::4].astype(np.float32))
save_file(out, sys.argv[1])
