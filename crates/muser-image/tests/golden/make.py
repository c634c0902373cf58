#!/usr/bin/env python3
"""What the tests of this crate read: pictures, and what other programs make of them.

    make.py GOLDEN OUT

GOLDEN holds what transformers 5.24.0 with torchvision 0.27.1 made (preprocess/, preprocess.tsv, preprocess.safetensors and
vision-tiny.safetensors: pictures, grids, resized bytes). Copied from there:
  OUT/NN.png, OUT/tNN.webp   38 + 7 pictures; the 7 as lossless WebP (of 40 + 11; the others are large and show nothing new)
  OUT/pictures.tsv           file, height, width, rows, columns, SHA-256 of the decoded RGB and of the resized bytes
  OUT/grids.bin              2,000 times height, width, rows, columns as little-endian u16
Made here, with Pillow 13.0.0 as the yardstick:
  OUT/decode/*               files of every kind that is decoded
  OUT/decode.tsv             file, height, width, SHA-256 of Pillow's RGB over white, or the name of a lossless WebP that holds it (lossy kinds)
Needs numpy, Pillow, safetensors.
"""
import hashlib, io, os, struct, sys, zlib
import numpy as np
from PIL import Image, ImageOps
from safetensors.numpy import load_file

sha = lambda x: hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()


def copied(golden, out):
    z, lines = load_file(f"{golden}/vision-tiny.safetensors"), []
    for line in open(f"{golden}/preprocess.tsv").read().splitlines()[1:]:
        f, _, h, w, rows, cols, rgb, resized = line.split("\t")
        if f in ("14.png", "15.png"):
            continue
        open(f"{out}/{f}", "wb").write(open(f"{golden}/preprocess/{f}", "rb").read())
        lines.append((f, h, w, rows, cols, rgb, resized))
    for i in (i for i in range(11) if i not in (2, 3, 4, 6)):
        a = z.get(f"{i}.rgba", z[f"{i}.rgb"])
        f, (gh, gw) = f"t{i:02}.webp", z[f"{i}.grid"]
        Image.fromarray(a).save(f"{out}/{f}", lossless=True, quality=100, method=6, exact=True)
        lines.append((f, *a.shape[:2], gh // 2, gw // 2, sha(z[f"{i}.rgb"]), sha(z[f"{i}.resized"])))
    open(f"{out}/pictures.tsv", "w").write("".join("\t".join(map(str, l)) + "\n" for l in lines))
    grids = load_file(f"{golden}/preprocess.safetensors")["grids"]
    open(f"{out}/grids.bin", "wb").write(grids.astype("<u2").tobytes())
    assert (grids < 65536).all()


def png(samples, colour, depth, extra=b"", interlaced=False):
    """A PNG by hand: samples [h, w, channels] of any depth, Adam7 if wanted; `extra` are chunks before the pixels."""
    chunk = lambda t, d: struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d))
    h, w, _ = samples.shape

    def lines(a):
        if 0 in a.shape[:2]:
            return b""
        flat = a.reshape(len(a), -1).astype(np.uint16)
        if depth == 16:
            rows = [r.astype(">u2").tobytes() for r in flat]
        elif depth == 8:
            rows = [r.astype(np.uint8).tobytes() for r in flat]
        else:
            rows = [np.packbits(((r[:, None] >> np.arange(depth - 1, -1, -1)) & 1).astype(np.uint8).ravel()).tobytes() for r in flat]
        return b"".join(b"\0" + r for r in rows)

    passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
    raw = b"".join(lines(samples[y::dy, x::dx]) for y, x, dy, dx in passes) if interlaced else lines(samples)
    head = struct.pack(">IIBBBBB", w, h, depth, colour, 0, 0, int(interlaced))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + extra + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")


def made(out):
    os.makedirs(f"{out}/decode", exist_ok=True)
    rng, lines = np.random.default_rng(5), []
    h, w = 37, 50
    y, x = np.mgrid[0:h, 0:w]
    rgb = np.dstack([x * 5, y * 6, (x * 3 + y * 4) % 256]).astype(np.uint8)
    rgb[8:20, 10:30] = (220, 40, 30)
    soft, alpha = Image.fromarray(rgb), (x * 5 + y * 3) % 256
    rgba = np.dstack([rgb, alpha]).astype(np.uint8)
    chunk = lambda t, d: struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d))

    def put(name, data, lossy=False, expected=None):
        open(f"{out}/decode/{name}", "wb").write(data)
        if expected is None:
            im = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
            im = im.convert("RGBA") if "transparency" in im.info or "A" in im.mode else im.convert("RGB").convert("RGBA")
            c, a = (np.asarray(im)[..., :3].astype(int), np.asarray(im)[..., 3:].astype(int))
            expected = ((c * a + 255 * (255 - a) + 127) // 255).astype(np.uint8)
        known = sha(expected)
        if lossy:
            known = "expected-" + name.split(".")[0] + ".webp"
            Image.fromarray(expected).save(f"{out}/decode/{known}", lossless=True, quality=100, method=6)
        lines.append((name, *expected.shape[:2], known))

    def saved(name, im, lossy=False, **options):
        buffer = io.BytesIO()
        im.save(buffer, {"jpg": "JPEG", "png": "PNG", "gif": "GIF", "webp": "WEBP"}[name.split(".")[1]], **options)
        put(name, buffer.getvalue(), lossy)

    wide = rng.integers(0, 65536, (h, w, 4))
    upper = (wide >> 8).astype(np.uint8)
    over = lambda c, a: ((c.astype(int) * a + 255 * (255 - a.astype(int)) + 127) // 255).astype(np.uint8)
    put("rgb16.png", png(wide[..., :3], 2, 16), expected=upper[..., :3])
    put("rgba16.png", png(wide, 6, 16), expected=over(upper[..., :3], upper[..., 3:]))
    put("grey16.png", png(wide[..., :1], 0, 16), expected=np.repeat(upper[..., :1], 3, 2))
    put("greya16.png", png(wide[..., :2], 4, 16), expected=np.repeat(over(upper[..., :1], upper[..., 1:2]), 3, 2))
    put("interlaced.png", png(rgb, 2, 8, interlaced=True))
    put("interlaced-odd.png", png(rgba[:3, :5], 6, 8, interlaced=True))
    put("interlaced-4bit.png", png((x // 5 % 16)[..., None], 0, 4, interlaced=True))
    for depth in (1, 2, 4):
        levels = ((x // 3 + y) % (1 << depth))[..., None]
        put(f"grey{depth}.png", png(levels, 0, depth))
        palette = chunk(b"PLTE", rng.integers(0, 256, 3 << depth, dtype=np.uint8).tobytes())
        put(f"palette{depth}.png", png(levels, 3, depth, palette + chunk(b"tRNS", bytes([0, 128]))))
    put("colour-key.png", png(rgb, 2, 8, chunk(b"tRNS", struct.pack(">HHH", 220, 40, 30))))
    saved("grey.png", soft.convert("L")); saved("greya.png", Image.fromarray(rgba).convert("LA"))
    saved("rgb.png", soft); saved("rgba.png", Image.fromarray(rgba)); saved("palette8.png", soft.quantize(200))
    saved("plain.gif", soft.quantize(64)); saved("one.gif", Image.fromarray(rgb[:1, :1]))
    saved("clear.gif", Image.fromarray(np.dstack([rgb, (alpha > 90) * 255]).astype(np.uint8)))
    frames = [Image.fromarray(np.roll(rgb, 5 * i, 1)).quantize(32) for i in range(4)]
    saved("moving.gif", frames[0], save_all=True, append_images=frames[1:], duration=50)
    saved("interlaced.gif", soft.quantize(16), interlace=1)
    saved("lossless.webp", soft, lossless=True); saved("lossless-alpha.webp", Image.fromarray(rgba), lossless=True, exact=True)
    still = [Image.fromarray(np.roll(rgb, 9 * i, 0)) for i in range(3)]
    saved("moving.webp", still[0], save_all=True, append_images=still[1:], lossless=True)
    saved("lossy.webp", soft, True, quality=80); saved("lossy-alpha.webp", Image.fromarray(rgba), True, quality=80)
    for name, options in {"j444": {"subsampling": 0}, "j422": {"subsampling": 1}, "j420": {"subsampling": 2}, "jq30": {"quality": 30},
                          "progressive": {"progressive": True, "quality": 85}, "restarts": {"restart_marker_blocks": 3}}.items():
        saved(f"{name}.jpg", soft, True, **options)
    saved("grey.jpg", soft.convert("L"), True); saved("cmyk.jpg", soft.convert("CMYK"), True, quality=95)
    turn = Image.Exif()
    for i in range(1, 9):
        turn[0x0112] = i
        saved(f"turned{i}.png", soft, exif=turn)
    turn[0x0112] = 6
    saved("turned.jpg", soft, True, exif=turn); saved("turned.webp", soft, lossless=True, exif=turn)
    open(f"{out}/decode.tsv", "w").write("".join("\t".join(map(str, l)) + "\n" for l in lines))


copied(*sys.argv[1:]); made(sys.argv[2])
