#!/usr/bin/env python3
"""Decodes and checks hand-off frames: `handoff_decode.py FILE`, each line `name: hexadecimal bytes` of one frame.

Written from handoff.md alone, with the standard library alone and BLAKE3 of kvpack_decode.py. Strict: anything that no writer
produces is an exception. Prints a line a frame; where the file has the frames of one transfer (request, begin, chunk, seal)
their digests are compared too.
"""

import struct
import sys

from kvpack_decode import D as derive_key, H as keyed_hash

KINDS = "HELLO LOAD QUOTE QUOTED REQUEST BEGIN CHUNK PROGRESS STAGE SEAL ACK NACK ABORT".split()
POSITIONS, RANGES, STAGES, CHUNK_BYTES = 1 << 20, 8192, 64, 320 * 1024
LIMITS = dict(
    HELLO=8192, LOAD=512, QUOTE=64 + 32 * 4096, REQUEST=256 + 4 * POSITIONS + 4 * STAGES + 16 * RANGES,
    BEGIN=1024, CHUNK=48 + CHUNK_BYTES,
)
REFUSALS = 40


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def fixed(self, count):
        assert self.at + count <= len(self.data), "truncated"
        self.at += count
        return self.data[self.at - count:self.at]

    def number(self, count):
        return int.from_bytes(self.fixed(count), "little")

    def between(self, count, low, high):
        value = self.number(count)
        assert low <= value <= high, f"{value} is not in {low}..={high}"
        return value

    def text(self, limit):
        data = self.fixed(self.between(1, 0, limit))
        assert all(0x20 <= byte <= 0x7E for byte in data), "not printable"
        return data.decode()

    def list(self, limit, size, item):
        count = self.between(4, 0, limit)
        assert count * size <= len(self.data) - self.at, "truncated"
        return [item() for _ in range(count)]

    def ranges(self):
        ranges = self.list(RANGES, 8, lambda: (self.number(4), self.number(4)))
        assert all(start < end for start, end in ranges), "an empty range"
        assert all(a[1] < b[0] for a, b in zip(ranges, ranges[1:])), "ranges that touch"
        return ranges

    def transfer(self):
        return self.between(4, 1, 0xFFFFFFFF)

    def planes(self):
        def plane():
            return dict(
                group=self.between(1, 0, 1), component=self.between(1, 0, 1), layers=self.between(2, 1, 1024),
                heads=self.between(2, 1, 64), dim=self.between(2, 4, 1024), digits=self.between(2, 1, 2),
            )

        planes = self.list(4, 10, plane)
        places = [(plane["group"], plane["component"]) for plane in planes]
        assert planes and places == sorted(set(places)), "order of planes"
        assert all(plane["dim"] % 4 == 0 for plane in planes), "dim"
        return planes


def hello(r):
    assert r.number(2) == 1, "version"
    out = dict(connection=r.fixed(16), stream=r.between(1, 0, 7), streams=r.between(1, 1, 8), serves=r.between(1, 0, 3))
    out.update(max_positions=r.number(4), max_transfers=r.number(2), rows_a_minute=r.number(4))
    out.update(identity=r.fixed(32), draft=r.fixed(32), semantic=r.fixed(32), window=r.number(4), planes=r.planes())
    out.update(route=r.text(48), build=r.text(48))
    out.update(parts=r.list(32, 34, lambda: (r.text(48), r.text(96), r.fixed(32))))
    out.update(knows=r.fixed(32), next_key=r.fixed(32), next_proof=r.fixed(64))
    assert any(plane["component"] == 1 for plane in out["planes"]) == any(out["draft"]), "draft"
    assert any(out["next_key"]) or not any(out["next_proof"]), "next proof"
    return out


def load(r):
    out = dict(stamp_ms=r.number(4), echo_ms=r.number(4), held_ms=r.number(4), queued_rows=r.number(4))
    out.update(running=r.number(2), places=r.number(2), free_bytes=r.number(8), draining=r.between(1, 0, 1))
    out.update(rates=r.list(16, 8, lambda: (r.number(4), r.number(4))))
    depths = [depth for depth, _ in out["rates"]]
    assert depths == sorted(set(depths)), "order of rates"
    return out


def quote(r):
    out = dict(question=r.number(4), identity=r.fixed(32), positions=r.between(4, 1, POSITIONS), held=r.number(4))
    out.update(hashes=r.list(4096, 32, lambda: r.fixed(32)))
    assert out["held"] < out["positions"] and len(out["hashes"]) <= out["positions"] // 256
    return out


def quoted(r):
    return dict(
        question=r.number(4), known=r.number(4), wait_ms=r.number(4), compute_ms=r.number(4), refused=r.between(1, 0, 14)
    )


def request(r):
    out = dict(transfer=r.transfer(), nonce=r.fixed(16), series=r.fixed(16), identity=r.fixed(32), draft=r.fixed(32))
    out.update(tenant=r.fixed(32))
    out.update(window=r.between(4, 1, POSITIONS), budget_ms=r.between(4, 1, 0xFFFFFFFF), priority=r.number(1))
    out.update(stages=r.list(STAGES, 4, lambda: r.number(4)), own=r.ranges(), received=r.ranges())
    r.list(0, 1, lambda: None)
    out.update(ids=r.list(POSITIONS, 4, lambda: r.number(4)))
    cut, stages = len(out["ids"]), out["stages"]
    assert cut > 0 and stages == sorted(set(stages)), "stages"
    assert all(0 < stage < cut and stage % 256 == 0 for stage in stages), "stages"
    for start, end in out["own"]:
        assert all(end <= a or b <= start for a, b in out["received"]), "own and received overlap"
    return out


def begin(r):
    out = dict(transfer=r.transfer(), nonce=r.fixed(16), producer_nonce=r.fixed(16), identity=r.fixed(32))
    out.update(prefix=r.fixed(32), holdings=r.fixed(32), cut=r.number(4), stages=r.list(STAGES, 4, lambda: r.number(4)))
    out.update(planes=r.planes(), chunks=r.number(4), bytes=r.number(8))
    return out


def chunk(r):
    out = dict(transfer=r.transfer(), place=r.data[4:16], group=r.between(1, 0, 1), component=r.between(1, 0, 1))
    out.update(layer=r.number(2), block=r.number(4), first_row=r.number(2), rows=r.number(2), digest=r.fixed(32))
    out.update(payload=r.fixed(len(r.data) - r.at))
    return out


def progress(r):
    out = dict(transfer=r.transfer(), side=r.between(1, 0, 1))
    if out["side"] == 0:
        out.update(rows=r.number(4), rest_ms=r.number(4))
    else:
        out.update(credit=r.number(8), verified=r.number(4), installed=r.number(4))
    return out


def stage(r):
    return dict(transfer=r.transfer(), boundary=r.number(4), root=r.fixed(32))


def seal(r):
    return dict(transfer=r.transfer(), chunks=r.number(4), bytes=r.number(8), root=r.fixed(32), code=r.fixed(32))


def ack(r):
    return dict(transfer=r.transfer(), root=r.fixed(32))


def nack(r):
    return dict(transfer=r.transfer(), refusal=r.between(2, 0, REFUSALS - 1))


def abort(r):
    out = dict(transfer=r.number(4), side=r.between(1, 0, 1), reason=r.between(1, 1, 14))
    assert out["transfer"] or not out["side"], "side"
    return out


def decode(data):
    kind, zero, length = struct.unpack("<HHI", data[:8])
    assert 1 <= kind <= len(KINDS) and zero == 0, "header"
    name = KINDS[kind - 1]
    assert length <= LIMITS.get(name, 128) and length == len(data) - 8, "length"
    reader = Reader(data[8:])
    fields = globals()[name.lower()](reader)
    assert reader.at == len(reader.data), "trailing"
    return name, fields


def key(context, request, prefix):
    return derive_key(context, request["series"] + request["identity"] + prefix)


def check_transfer(found, data):
    request, begin, chunk, seal = (found[name] for name in ("REQUEST", "BEGIN", "CHUNK", "SEAL"))
    ids = request["ids"]
    prefix = derive_key("muser hand-off v1 prefix", struct.pack(f"<Q{len(ids)}I", len(ids), *ids))
    assert prefix == begin["prefix"], "the prefix's digest"
    encoded = b""
    for ranges in (request["own"], request["received"]):
        encoded += struct.pack("<I", len(ranges)) + b"".join(struct.pack("<II", *one) for one in ranges)
    assert derive_key("muser hand-off v1 holdings", encoded) == begin["holdings"], "the holdings' digest"
    rows = chunk["place"] + chunk["payload"]
    assert keyed_hash(key("muser hand-off v1 chunk", request, prefix), rows) == chunk["digest"], "the chunk's digest"
    bound = struct.pack("<Q", len(data["BEGIN"])) + data["BEGIN"] + seal["root"]
    bound += struct.pack("<IQ", seal["chunks"], seal["bytes"])
    assert keyed_hash(key("muser hand-off v1 seal", request, prefix), bound) == seal["code"], "the seal's code"
    plane = next(
        plane for plane in begin["planes"] if (plane["group"], plane["component"]) == (chunk["group"], chunk["component"])
    )
    row_bytes = plane["heads"] * (2 * plane["digits"] * plane["dim"] + 8)
    assert len(chunk["payload"]) == chunk["rows"] * row_bytes, "bytes of rows"
    print("chunk, seal and prefix digests agree")


def main():
    found, data = {}, {}
    with open(sys.argv[1]) as file:
        for line in file:
            name, text = line.rstrip("\n").split(": ")
            bytes_ = bytes.fromhex(text)
            kind, fields = decode(bytes_)
            found[kind], data[kind] = fields, bytes_
            print(name, kind, len(bytes_), *(f"{key}={value}" for key, value in fields.items() if isinstance(value, int)))
    if len(found) == len(KINDS):
        check_transfer(found, data)


if __name__ == "__main__":
    main()
