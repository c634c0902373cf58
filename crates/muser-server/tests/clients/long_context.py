"""A copy of a model file with a longer context: python long_context.py FROM TO TOKENS

Coding agents begin with more than the bundled model's context. Its weights are used as they are beyond it; what is looked
at is what is sent, not what the model says there.
"""

import struct
import sys

KEY = b"muse-glimmer.context_length"
UINT32 = 4


def main():
    source, target, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
    data = bytearray(open(source, "rb").read())
    # A key is its length and its bytes; the value's type and the value follow.
    at = data.find(struct.pack("<Q", len(KEY)) + KEY)
    assert at >= 0, "the file names no context length"
    value = at + 8 + len(KEY)
    (kind,) = struct.unpack_from("<I", data, value)
    assert kind == UINT32, kind
    struct.pack_into("<I", data, value + 4, tokens)
    open(target, "wb").write(data)


main()
