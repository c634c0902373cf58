#!/usr/bin/env python3
"""Decodes and checks a KV pack bundle with its key file: `kvpack_decode.py BUNDLE KEYFILE [TENANT]`.

`kvpack_decode.py --encode FILE` decodes manifests (each with its length as u32 before it and the digest of its identity
behind it) to plain values, encodes them from these again and compares.

Written from kvpack.md alone, with the standard library alone: BLAKE3 and AES-256-GCM are below. It is slow, strict, and
independent of the Rust code. Prints one JSON object; anything that does not verify is an exception.
"""

import hashlib
import hmac
import json
import struct
import sys

# --- BLAKE3 -----------------------------------------------------------------------------------------------------------

IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
CHUNK_START, CHUNK_END, PARENT, ROOT, KEYED, CONTEXT, MATERIAL = 1, 2, 4, 8, 16, 32, 64
MASK = 0xFFFFFFFF


def compress(chain, block, counter, length, flags):
    m = list(struct.unpack("<16I", block))
    v = list(chain) + list(IV[:4]) + [counter & MASK, counter >> 32, length, flags]

    def mix(a, b, c, d, x, y):
        v[a] = (v[a] + v[b] + x) & MASK
        v[d] ^= v[a]
        v[d] = (v[d] >> 16 | v[d] << 16) & MASK
        v[c] = (v[c] + v[d]) & MASK
        v[b] ^= v[c]
        v[b] = (v[b] >> 12 | v[b] << 20) & MASK
        v[a] = (v[a] + v[b] + y) & MASK
        v[d] ^= v[a]
        v[d] = (v[d] >> 8 | v[d] << 24) & MASK
        v[c] = (v[c] + v[d]) & MASK
        v[b] ^= v[c]
        v[b] = (v[b] >> 7 | v[b] << 25) & MASK

    for round_ in range(7):
        mix(0, 4, 8, 12, m[0], m[1])
        mix(1, 5, 9, 13, m[2], m[3])
        mix(2, 6, 10, 14, m[4], m[5])
        mix(3, 7, 11, 15, m[6], m[7])
        mix(0, 5, 10, 15, m[8], m[9])
        mix(1, 6, 11, 12, m[10], m[11])
        mix(2, 7, 8, 13, m[12], m[13])
        mix(3, 4, 9, 14, m[14], m[15])
        if round_ < 6:
            m = [m[i] for i in PERMUTATION]
    return [v[i] ^ v[i + 8] for i in range(8)]


def blake3_raw(key, flags, data):
    """The 32 bytes of the root."""

    def chunk(index, part, root):
        chain = key
        blocks = [part[i : i + 64] for i in range(0, len(part), 64)] or [b""]
        for i, block in enumerate(blocks):
            f = flags | (CHUNK_START if i == 0 else 0)
            if i == len(blocks) - 1:
                f |= CHUNK_END | (ROOT if root else 0)
            chain = compress(chain, block.ljust(64, b"\0"), index, len(block), f)
        return chain

    def tree(first, parts, root):
        if len(parts) == 1:
            return chunk(first, parts[0], root)
        left = 1 << (len(parts) - 1).bit_length() - 1
        pair = tree(first, parts[:left], False) + tree(first + left, parts[left:], False)
        return compress(key, struct.pack("<16I", *pair), 0, 64, flags | PARENT | (ROOT if root else 0))

    parts = [data[i : i + 1024] for i in range(0, len(data), 1024)] or [b""]
    return struct.pack("<8I", *tree(0, parts, True))


def blake3(data):
    return blake3_raw(IV, 0, data)


def H(key, data):
    return blake3_raw(struct.unpack("<8I", key), KEYED, data)


def D(context, data):
    key = blake3_raw(IV, CONTEXT, context.encode())
    return blake3_raw(struct.unpack("<8I", key), MATERIAL, data)


# --- AES-256-GCM ------------------------------------------------------------------------------------------------------


def make_sbox():
    p = q = 1
    box = [0x63] * 256
    while True:
        p ^= (p << 1) ^ (0x11B if p & 0x80 else 0)
        p &= 0xFF
        q ^= q << 1
        q ^= q << 2
        q ^= q << 4
        q &= 0xFF
        if q & 0x80:
            q ^= 0x09
        x = q ^ (q << 1 | q >> 7) ^ (q << 2 | q >> 6) ^ (q << 3 | q >> 5) ^ (q << 4 | q >> 4)
        box[p] = (x ^ 0x63) & 0xFF
        if p == 1:
            return box


SBOX = make_sbox()
TWICE = [(x << 1 ^ (0x1B if x & 0x80 else 0)) & 0xFF for x in range(256)]


def expand_key(key):
    words = [list(key[i : i + 4]) for i in range(0, 32, 4)]
    rcon = 1
    for i in range(8, 60):
        word = list(words[-1])
        if i % 8 == 0:
            word = [SBOX[b] for b in word[1:] + word[:1]]
            word[0] ^= rcon
            rcon = TWICE[rcon]
        elif i % 8 == 4:
            word = [SBOX[b] for b in word]
        words.append([a ^ b for a, b in zip(words[i - 8], word)])
    return [sum(words[i : i + 4], []) for i in range(0, 60, 4)]


def aes(keys, block):
    state = [a ^ b for a, b in zip(block, keys[0])]
    for round_ in range(1, 15):
        state = [SBOX[state[(i + 4 * (i % 4)) % 16]] for i in range(16)]
        if round_ < 14:
            mixed = []
            for c in range(0, 16, 4):
                a, b, d, e = state[c : c + 4]
                t = a ^ b ^ d ^ e
                mixed += [a ^ t ^ TWICE[a ^ b], b ^ t ^ TWICE[b ^ d], d ^ t ^ TWICE[d ^ e], e ^ t ^ TWICE[e ^ a]]
            state = mixed
        state = [a ^ b for a, b in zip(state, keys[round_])]
    return bytes(state)


def gcm_open(key, nonce, associated, data, tag):
    keys = expand_key(key)
    h = int.from_bytes(aes(keys, bytes(16)), "big")
    # Products of h with each bit, so that a multiplication is a sum.
    powers = []
    for _ in range(128):
        powers.append(h)
        h = h >> 1 ^ (0xE1 << 120 if h & 1 else 0)
    y = 0
    for part in (associated, data, struct.pack(">QQ", 8 * len(associated), 8 * len(data))):
        for i in range(0, len(part), 16):
            y ^= int.from_bytes(part[i : i + 16].ljust(16, b"\0"), "big")
            product = 0
            for bit in range(128):
                if y >> (127 - bit) & 1:
                    product ^= powers[bit]
            y = product
    start = aes(keys, nonce + struct.pack(">I", 1))
    if not hmac.compare_digest(bytes(a ^ b for a, b in zip(y.to_bytes(16, "big"), start)), tag):
        raise ValueError("a chunk does not match its tag")
    plain = bytearray()
    for i in range(0, len(data), 16):
        stream = aes(keys, nonce + struct.pack(">I", 2 + i // 16))
        plain += bytes(a ^ b for a, b in zip(data[i : i + 16], stream))
    return bytes(plain)


def hkdf_sha256(salt, secret, info):
    pseudo = hmac.new(salt, secret, hashlib.sha256).digest()
    return hmac.new(pseudo, info + b"\1", hashlib.sha256).digest()


# --- the format -------------------------------------------------------------------------------------------------------


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, count):
        if len(self.data) - self.at < count:
            raise ValueError("truncated")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, size):
        return int.from_bytes(self.take(size), "little")

    def bytes(self):
        return self.take(self.number(4))

    def text(self, expected=None):
        text = self.bytes().decode()
        if expected is not None and text != expected:
            raise ValueError(f"{expected!r} expected, {text!r} found")
        return text

    def flag(self):
        return must(self.number(1), (0, 1)) == 1

    def end(self):
        if self.at != len(self.data):
            raise ValueError("bytes are left over")


def must(found, allowed):
    if found not in allowed:
        raise ValueError(f"{found} found, one of {allowed} expected")
    return found


def text(value):
    value = value.encode()
    return struct.pack("<I", len(value)) + value


class Keys:
    def __init__(self, data):
        of = Reader(data)
        must(of.take(8), (b"MUSRKEYS",))
        must(of.number(2), (1,))
        must(of.number(2), (0,))
        count, self.minimum = of.number(4), of.number(4)
        must(of.number(4), (0,))
        self.base = of.take(32)
        self.epochs = {}
        for _ in range(count):
            number, revoked = of.number(4), of.number(4)
            of.number(8)
            secret = of.take(32)
            if not must(revoked, (0, 1)):
                self.epochs[number] = secret
        covered = data[: of.at]
        must(of.take(32), (H(D("muser pack v1 key file", self.base), covered),))
        of.end()
        self.id = D("muser pack v1 key id", self.base)[:16]
        self.chunk = D("muser pack v1 content chunk", self.base)

    def tenant(self, purpose, label):
        return D(f"muser pack v1 {purpose}", self.base + label.encode())


LABELS = {1: ("manifest", b"manifest"), 2: ("segment", b"segment_"), 3: ("segment", b"segment_"), 4: ("record", b"record__")}


def open_object(keys, name, data):
    """Header fields and plaintext of an object."""
    of = Reader(data)
    must(of.take(8), (b"MUSRPACK",))
    must(of.number(2), (1,))
    kind, sealed = must(of.number(1), (1, 2, 3, 4)), must(of.number(1), (1, 2)) == 1
    header_bytes, epoch, chunk_bytes = of.number(4), of.number(4), of.number(4)
    payload, chunks, row_bytes, positions = of.number(8), of.number(4), of.number(4), of.number(4)
    must(of.number(4), (0,))
    must(of.take(16), (keys.id,))
    must(of.take(32), (name,))
    salt = of.take(32)
    must(header_bytes, (-(-(128 + chunks * 16 + 32) // 4096) * 4096,))
    must(chunks, (-(-payload // chunk_bytes),))
    must(chunk_bytes % 4096 + chunk_bytes % row_bytes + payload % row_bytes, (0,))
    must(len(data), (header_bytes + payload,))
    if epoch < keys.minimum or epoch not in keys.epochs:
        raise ValueError(f"epoch {epoch} may not be read")
    secret = keys.epochs[epoch]
    code = H(D("muser pack v1 authentication", secret), data[: header_bytes - 32])
    must(data[header_bytes - 32 : header_bytes], (code,))
    must(data[128 + chunks * 16 : header_bytes - 32].strip(b"\0"), (b"",))
    purpose, label = LABELS[kind]
    secret = D(f"muser pack v1 {purpose} encryption", secret)
    key = hkdf_sha256(salt, secret, b"muser pack v1 data key" + label + name)
    plain = b""
    for i in range(chunks):
        tag = data[128 + i * 16 : 144 + i * 16]
        chunk = data[header_bytes + i * chunk_bytes : header_bytes + min((i + 1) * chunk_bytes, payload)]
        number = struct.pack("<I", i)
        if sealed:
            chunk = gcm_open(key, number + bytes(8), blake3(data[:128]) + number, chunk, tag)
        else:
            gcm_open(key, number + b"\2" + bytes(7), chunk, b"", tag)
        plain += chunk
    return {"kind": kind, "row_bytes": row_bytes, "positions": positions, "chunk_bytes": chunk_bytes}, plain


def decode_identity(data):
    of = Reader(data)
    of.text("muser pack identity")
    must(of.number(2), (1,))
    semantic, representation = of.bytes(), of.bytes()
    of.end()
    of = Reader(semantic)
    of.text("semantic")
    found = {"weights": of.take(32).hex(), "architecture": of.bytes().hex(), "quantisation": of.text()}
    found["adapters"] = [(of.take(32).hex(), of.number(4)) for _ in range(of.number(4))]
    found["tokenizer"], found["template"] = of.take(32).hex(), of.take(32).hex()
    found["rotary_base_bits"], found["pairing"], found["scaling"] = of.number(8), of.text(), of.text()
    found["rotating"] = [of.flag() for _ in range(of.number(4))]
    found["origin"] = of.number(8)
    found["sliding_layers"] = [of.flag() for _ in range(of.number(4))]
    for name in ("window", "kv_heads", "head_dim", "block_len"):
        found[name] = of.number(4)
    found["scalars"] = [(of.text(), of.number(8)) for _ in range(of.number(4))]
    found["context_policy"] = of.text()
    found["media"] = [of.take(32).hex(), of.take(32).hex()] if of.flag() else None
    found["draft"] = [of.take(32).hex(), of.number(4), of.number(4)] if of.flag() else None
    of.end()
    of = Reader(representation)
    of.text("representation")
    for name in ("route", "kv_type", "layout"):
        found[name] = of.text()
    for name in ("row_bytes", "full_block_bytes", "sliding_block_bytes"):
        found[name] = of.number(4)
    of.end()
    return found, D("muser pack v1 representation identity", data)


def encode_identity(of):
    def number(size, *values):
        return b"".join(value.to_bytes(size, "little") for value in values)

    def data(value):
        return number(4, len(value)) + value

    def flags(values):
        return number(4, len(values)) + bytes(values)

    raw = bytes.fromhex
    semantic = text("semantic") + raw(of["weights"]) + data(raw(of["architecture"])) + text(of["quantisation"])
    semantic += number(4, len(of["adapters"])) + b"".join(raw(digest) + number(4, bits) for digest, bits in of["adapters"])
    semantic += raw(of["tokenizer"]) + raw(of["template"])
    semantic += number(8, of["rotary_base_bits"]) + text(of["pairing"]) + text(of["scaling"])
    semantic += flags(of["rotating"]) + number(8, of["origin"]) + flags(of["sliding_layers"])
    semantic += number(4, *(of[name] for name in ("window", "kv_heads", "head_dim", "block_len")))
    semantic += number(4, len(of["scalars"])) + b"".join(text(name) + number(8, bits) for name, bits in of["scalars"])
    semantic += text(of["context_policy"])
    semantic += b"\1" + b"".join(map(raw, of["media"])) if of["media"] else b"\0"
    semantic += b"\1" + raw(of["draft"][0]) + number(4, *of["draft"][1:]) if of["draft"] else b"\0"
    representation = text("representation") + b"".join(text(of[name]) for name in ("route", "kv_type", "layout"))
    sizes = (of[name] for name in ("row_bytes", "full_block_bytes", "sliding_block_bytes"))
    representation += number(4, *sizes)
    return text("muser pack identity") + number(2, 1) + data(semantic) + data(representation)


def encode_manifest(of, identity):
    encoded = encode_identity(identity)
    data = text("muser pack manifest") + struct.pack("<HH", 1, 0) + of["tenant"]
    data += struct.pack("<I", len(encoded)) + encoded + struct.pack("<Q", of["time"]) + of["root"]
    data += struct.pack("<I", len(of["units"])) + b"".join(of["units"]) + struct.pack("<I", len(of["blocks"]))
    for key, full, sliding in of["blocks"]:
        data += key + full + (b"\0" if sliding is None else b"\1" + sliding)
    return data


def encode_all(data):
    of, count = Reader(data), 0
    while of.at < len(data):
        manifest = of.bytes()
        fields = decode_manifest(manifest)
        identity, digest = decode_identity(fields["identity"])
        must(of.take(32), (digest,))
        must(encode_manifest(fields, identity), (manifest,))
        count += 1
    return count


def decode_manifest(data):
    of = Reader(data)
    of.text("muser pack manifest")
    must(of.number(2), (1,))
    must(of.number(2), (0,))
    manifest = {"tenant": of.take(16)}
    manifest["identity"] = of.bytes()
    manifest["time_at"] = of.at
    manifest["time"] = of.number(8)
    manifest["root"] = of.take(32)
    manifest["units"] = [of.take(8) for _ in range(of.number(4))]
    manifest["blocks"] = []
    for _ in range(must(of.number(4), (-(-len(manifest["units"]) // 256),))):
        key, full = of.take(32), of.take(32)
        manifest["blocks"].append((key, full, of.take(32) if of.flag() else None))
    of.end()
    return manifest


def decode_bundle(keys, data, tenant):
    of = Reader(data)
    must(of.take(8), (b"MUSRBNDL",))
    must(of.number(2), (1,))
    must(of.number(2), (0,))
    entries = [(must(of.number(8), (0, 1)), of.number(8), of.take(32)) for _ in range(of.number(4))]
    at, objects = of.at, {}
    for area, size, name in entries:
        at = -(-at // 4096) * 4096
        objects[area, name] = open_object(keys, name, data[at : at + size])
        at += size
    must(at, (len(data),))
    pack = entries[0][2]
    fields, payload = objects[must(entries[0][0], (0,)), pack]
    must(fields["kind"], (1,))
    manifest = decode_manifest(payload)
    must(manifest["tenant"], (keys.tenant("tenant", tenant)[:16],))
    timeless = payload[: manifest["time_at"]] + bytes(8) + payload[manifest["time_at"] + 8 :]
    must(pack, (H(keys.tenant("pack id", tenant), timeless),))
    identity, digest = decode_identity(manifest["identity"])
    prefix = keys.tenant("prefix", tenant)
    key = H(prefix, digest)
    must(key, (manifest["root"],))
    segments = []
    for i, (found, *names) in enumerate(manifest["blocks"]):
        units = manifest["units"][i * 256 : (i + 1) * 256]
        key = H(prefix, key + b"".join(units))
        must(found, (key,))
        for group, name in zip((2, 3), names):
            if name is None:
                continue
            fields, rows = objects[1, name]
            must((fields["kind"], fields["positions"]), ((group, len(units)),))
            content = text("muser pack segment") + struct.pack(
                "<BIIIQ", group, fields["row_bytes"], fields["positions"], fields["chunk_bytes"], len(rows)
            )
            for at in range(0, len(rows), fields["chunk_bytes"]):
                content += H(keys.chunk, rows[at : at + fields["chunk_bytes"]])
            must(name, (H(keys.tenant("content", tenant), content),))
            segments.append({"group": "full" if group == 2 else "sliding", "block": i, "rows": blake3(rows).hex()})
    return {
        "pack": pack.hex(),
        "identity": digest.hex(),
        "route": identity["route"],
        "positions": len(manifest["units"]),
        "tokens": blake3(b"".join(manifest["units"])).hex(),
        "segments": segments,
    }


def main():
    if blake3(b"").hex()[:16] != "af1349b9f5f9a1a6":
        raise AssertionError("BLAKE3 is broken")
    if sys.argv[1] == "--encode":
        with open(sys.argv[2], "rb") as manifests:
            print(encode_all(manifests.read()))
        return
    tenant = sys.argv[3] if len(sys.argv) > 3 else ""
    with open(sys.argv[1], "rb") as bundle, open(sys.argv[2], "rb") as key:
        print(json.dumps(decode_bundle(Keys(key.read()), bundle.read(), tenant)))


if __name__ == "__main__":
    main()
