#!/usr/bin/env python3
"""Machine code for one card in llama.cpp's prebuilt CUDA library, made without the card.

    python3 native_cuda.py LIBGGML_CUDA.so OUT.so --arch 90 --bin FOLDER [--only 0-67,69,82]

The prebuilt library has machine code for some cards and portable code (PTX) for the others. A driver older than the compiler that
wrote it refuses the portable code. NVIDIA's assembler of the same release (`ptxas` and `fatbinary` in FOLDER, from the
package nvidia-cuda-nvcc 13.1) turns it into machine code here, which older drivers of the same major version run. Every
module's images are replaced, in place, by that one; modules that --only leaves out get an empty image, and a program
that needs one of their kernels is told so by the driver. This makes the comparison fair: the peer runs native code.
Needs Python 3.9 and the package zstandard.
"""
import argparse
import os
import struct
import subprocess
import tempfile

import zstandard

MAGIC = 0xBA55ED50
PTX = 1


def section(data, wanted):
    """Offset and size of a section of a 64-bit ELF file."""
    table, = struct.unpack_from("<Q", data, 40)
    entry, count, names = struct.unpack_from("<HHH", data, 58)
    row = lambda n: struct.unpack_from("<IIQQQQ", data, table + n * entry)
    start = row(names)[4]
    for n in range(count):
        name = start + row(n)[0]
        if data[name:data.index(b"\0", name)] == wanted:
            return row(n)[4], row(n)[5]
    raise SystemExit(f"no section {wanted.decode()}: not a CUDA library")


def modules(data):
    """Offset and size of each module's images."""
    at, size = section(data, b".nv_fatbin")
    end = at + size
    while at < end - 16:
        magic, _, header, images = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:
            at += 8
            continue
        yield at, header + images
        at += header + images


def ptx(data, at, size, arch):
    """A module's portable code for an architecture."""
    end, at = at + size, at + 16
    while at < end:
        kind, _, header, stored = struct.unpack_from("<HHIQ", data, at)
        compressed, = struct.unpack_from("<I", data, at + 16)
        if (kind, struct.unpack_from("<I", data, at + 28)[0]) == (PTX, arch):
            body = data[at + header:at + header + compressed]
            return zstandard.ZstdDecompressor().decompressobj().decompress(body).rstrip(b"\0")
        at += header + stored
    raise SystemExit(f"a module has no portable code for {arch}")


def numbers(text):
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("out")
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--bin", required=True, help="the folder with ptxas and fatbinary")
    parser.add_argument("--only", help="modules to translate, such as 0-67,69")
    options = parser.parse_args()
    with open(options.library, "rb") as file:
        data = file.read()
    only = set(numbers(options.only)) if options.only else None
    out = bytearray(data)
    with tempfile.TemporaryDirectory() as folder:
        source, code, image = (os.path.join(folder, name) for name in ("in.ptx", "out.cubin", "out.fatbin"))
        for number, (at, size) in enumerate(modules(data)):
            text = ptx(data, at, size, options.arch)
            if only is not None and number not in only:
                text = f".version 8.0\n.target sm_{options.arch}\n.address_size 64\n.entry unused() {{ ret; }}\n".encode()
            with open(source, "wb") as file:
                file.write(text)
            subprocess.run([os.path.join(options.bin, "ptxas"), f"-arch=sm_{options.arch}", source, "-o", code], check=True)
            subprocess.run([os.path.join(options.bin, "fatbinary"), "--64", "--compress-all", f"--create={image}",
                            f"--image3=kind=elf,sm={options.arch},file={code}"], check=True)
            with open(image, "rb") as file:
                images = file.read()
            if len(images) > size:
                raise SystemExit(f"module {number}: {len(images)} bytes do not fit into {size}")
            out[at:at + size] = images + bytes(size - len(images))
    with open(options.out, "wb") as file:
        file.write(out)


if __name__ == "__main__":
    main()
