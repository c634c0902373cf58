#!/usr/bin/env python3
"""Does the engine see what the trainer sees? Held-out scenes of Muse Tiny's tower, asked of both.

    vision_scenes.py make TRAINER TEXT.gguf MMPROJ OUT --count 1000    scenes, questions, and what the trainer answers
    vision_scenes.py ask OUT http://127.0.0.1:8080  the same questions to a running `muser serve`

TRAINER is the folder of tiny_vision.py with muse_torch.py; make_muse_gguf.py lies beside it or on PYTHONPATH. `make` needs what the
trainer needs (torch, numpy, tokenizers, safetensors, Pillow), `ask` nothing. A question is one picture and one turn; an answer
counts when it is right to the last token. The trainer's answers are those of its own tower and text model in float32, with the
projector's weights as they are in the file.
"""
import argparse, base64, concurrent.futures, json, os, sys, urllib.request


def widened(ty, data):
    """The values of a tensor's bytes."""
    import numpy as np
    b = np.frombuffer(data, np.uint8)
    half = lambda x: np.ascontiguousarray(x).view(np.float16).astype(np.float32)
    if ty in ("F32", "F16"):
        return b.view(np.float32 if ty == "F32" else np.float16).astype(np.float32)
    if ty == "BF16":
        return (b.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if ty == "Q8_0":
        b = b.reshape(-1, 34)
        return (half(b[:, :2]) * b[:, 2:].copy().view(np.int8)).reshape(-1)
    if ty == "Q6_K":
        b = b.reshape(-1, 210)
        ql, qh = b[:, :128].reshape(-1, 2, 2, 32), b[:, 128:192].reshape(-1, 2, 1, 32)
        low = np.concatenate([ql & 15, ql >> 4], 2)  # [block, half, quarter, 32]
        high = np.concatenate([(qh >> shift) & 3 for shift in (0, 2, 4, 6)], 2)
        q = (low | high << 4).astype(np.int8).reshape(-1, 16, 16) - 32
        scale = b[:, 192:208].copy().view(np.int8).astype(np.float32) * half(b[:, 208:])
        return (q * scale[:, :, None]).reshape(-1)
    assert ty in ("Q4_K", "Q5_K"), ty
    b = b.reshape(-1, 144 if ty == "Q4_K" else 176)
    s, q = b[:, 4:16], b[:, -128:].reshape(-1, 4, 32)
    scale = np.concatenate([s[:, :4] & 63, (s[:, 8:] & 15) | (s[:, :4] >> 6) << 4], 1)
    least = np.concatenate([s[:, 4:8] & 63, (s[:, 8:] >> 4) | (s[:, 4:8] >> 6) << 4], 1)
    q = np.stack([q & 15, q >> 4], 2).reshape(-1, 8, 32)
    if ty == "Q5_K":
        q = q | ((b[:, 16:48, None] >> np.arange(8, dtype=np.uint8)) & 1).swapaxes(1, 2) << 4
    return ((half(b[:, :2]) * scale)[:, :, None] * q - (half(b[:, 2:4]) * least)[:, :, None]).reshape(-1)


def tensors_of(G, path):
    """Keys, and a function from a name to a tensor."""
    import numpy as np
    kv, infos = G.read_gguf(path)
    raw = np.memmap(path, np.uint8, "r")

    def get(name):
        shape, ty, off, size = infos[name]
        return np.array(widened(ty, raw[off:off + size].tobytes()), np.float32).reshape(shape[::-1])

    return kv, infos, get


def text_of(T, G, path):
    """The trainer's text model, which reads plain floats, from a file of any type."""
    import tempfile
    kv, infos, get = tensors_of(G, path)
    read = G.read_gguf
    with tempfile.NamedTemporaryFile() as f:
        plain, at = {}, 0
        for name, (shape, *_) in infos.items():
            data = get(name).tobytes()
            f.write(data)
            plain[name] = (shape, "F32", at, len(data))
            at += len(data)
        f.flush()
        G.read_gguf = lambda _: (kv, plain)
        try:
            return T.load_text(f.name)
        finally:
            G.read_gguf = read


def tower_of(T, G, path):
    import torch
    kv, _, tensor = tensors_of(G, path)
    get = lambda name: torch.from_numpy(tensor(name))

    c = lambda key: kv["clip.vision." + key]
    d, heads = c("embedding_length"), c("attention.head_count")
    tower = T.Tower(c("projection_dim"), d, heads, c("feed_forward_length"), c("block_count"), c("image_size") // 28,
                    get("mm.0.weight").shape[0])
    halves = lambda x: x.reshape(heads, d // heads // 2, 2, -1).swapaxes(1, 2).reshape(x.shape)
    sd = {"patch.weight": get("v.patch_embd.weight").reshape(d, 588), "pos": get("v.position_embd.weight")}
    for ours, theirs in (("pre", "v.pre_ln"), ("post", "v.post_ln")):
        for part in ("weight", "bias"):
            sd[f"{ours}.{part}"] = get(f"{theirs}.{part}")
    names = dict(ln1="ln1", ln2="ln2", q="attn_q", k="attn_k", v="attn_v", o="attn_out", up="ffn_up", down="ffn_down")
    for i in range(c("block_count")):
        for ours, theirs in names.items():
            for part in ("weight", "bias"):
                x = get(f"v.blk.{i}.{theirs}.{part}")
                sd[f"blocks.{i}.{ours}.{part}"] = halves(x) if ours in "qk" else x
    sd |= {f"mm.{i}.weight": get(f"mm.{i}.weight") for i in range(3)}
    tower.load_state_dict(sd)
    return tower.eval()


def make(a):
    sys.path[:0] = [a.trainer]
    import torch, tiny_vision as T, make_muse_gguf as G
    from PIL import Image
    os.makedirs(a.out, exist_ok=True)
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    text, tok = text_of(T, G, a.text)
    text, tower = text.to(dev), tower_of(T, G, a.mmproj).to(dev)
    batch = T.Batcher(tok, dev, a.seed)
    lines = []
    with torch.no_grad():
        while len(lines) < a.count:
            img, ids, lab, kinds = batch(min(25, a.count - len(lines)), 1)
            _, ok, at = T.loss_of(text, tower, img, ids, lab, batch.patch)
            good = torch.ones_like(at)
            good[at] = ok
            for b, [(kind, question, right)] in enumerate(kinds):
                name = f"{len(lines):04}.png"
                Image.fromarray(img[b].permute(1, 2, 0).byte().cpu().numpy()).save(os.path.join(a.out, name))
                row = ids[b].tolist()
                # The picture comes first, or last in some: as in training.
                first = row[len(batch.enc("<|begin_of_text|><|start|>user<|message|>"))] == tok.token_to_id("<|image_start|>")
                lines.append(dict(image=name, size=list(img.shape[2:]), kind=kind, question=question, right=right,
                                  picture_first=first, trainer=bool(good[b].all())))
            print(len(lines), file=sys.stderr)
    with open(os.path.join(a.out, "scenes.jsonl"), "w") as f:
        f.writelines(json.dumps(line) + "\n" for line in lines)
    print(json.dumps(shares(lines, "trainer")))


def shares(lines, who):
    """Per cent right, by kind of question and in all, of all pictures and of those that are not square."""
    def of(some):
        kinds = sorted({line["kind"] for line in some}) + ["all"]
        pick = lambda kind: [line[who] for line in some if kind in (line["kind"], "all")]
        return {kind: [round(100 * sum(pick(kind)) / max(1, len(pick(kind))), 1), len(pick(kind))] for kind in kinds}
    return {"all pictures": of(lines), "not square": of([line for line in lines if line["size"][0] != line["size"][1]])}


def ask(a):
    with open(os.path.join(a.out, "scenes.jsonl")) as f:
        lines = [json.loads(line) for line in f]

    def one(line):
        with open(os.path.join(a.out, line["image"]), "rb") as f:
            url = "data:image/png;base64," + base64.b64encode(f.read()).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": line["question"]}]
        body = dict(messages=[dict(role="user", content=parts if line["picture_first"] else parts[::-1])], temperature=0,
                    max_tokens=48, reasoning_effort="none")
        request = urllib.request.Request(a.server + "/v1/chat/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            line["answer"] = json.load(answer)["choices"][0]["message"]["content"]
        line["engine"] = line["answer"] == line["right"]
        return line

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        lines = list(pool.map(one, lines))
    with open(os.path.join(a.out, "answers.jsonl"), "w") as f:
        f.writelines(json.dumps(line) + "\n" for line in lines)
    both = sum(line["engine"] == line["trainer"] for line in lines)
    print(json.dumps({"questions": len(lines), "both_right_or_both_wrong": both,
                      "trainer": shares(lines, "trainer"), "engine": shares(lines, "engine")}, indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    p = commands.add_parser("make")
    for name in ("trainer", "text", "mmproj", "out"):
        p.add_argument(name)
    p.add_argument("--count", type=int, default=1000)
    p.add_argument("--seed", type=int, default=20261130)
    p.set_defaults(run=make)
    p = commands.add_parser("ask")
    p.add_argument("out")
    p.add_argument("server")
    p.set_defaults(run=ask)
    a = parser.parse_args()
    a.run(a)


if __name__ == "__main__":
    main()
