#!/usr/bin/env python3
"""Cut full reference logits down to what the tests need.

    cut.py muse-tiny-Q4_K_M.safetensors muse-tiny-Q4_K_M.cut.safetensors

The input holds `ids` i32 [n], `hf64` f32 [n, vocab] (Hugging Face transformers 5.24.0 with every operation in f64, on
the file's dequantised weights). Kept: the ids,
whole rows at `rows`, and `columns` of every row. Needs numpy and safetensors.
"""
import sys
import numpy as np
from safetensors.numpy import load_file, save_file

quantised, out = (sys.argv[1], sys.argv[2])
q = load_file(quantised)
n, vocab = q["hf64"].shape
# The first row, those at the window's edge, the last, and one on each side between.
rows = np.array([0, 128, 255, 256, 257, 320, n - 1], np.int32)
columns = np.arange(17, vocab, vocab // 16, dtype=np.int32)
save_file({
    "ids": q["ids"], "rows": rows, "columns": columns,
    "hf64_rows": np.ascontiguousarray(q["hf64"][rows]),
    "hf64_columns": np.ascontiguousarray(q["hf64"][:, columns]),
}, out)
