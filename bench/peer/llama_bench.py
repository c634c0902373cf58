#!/usr/bin/env python3
"""llama.cpp as the other side of `muser bench --compare`, at its best.

    muser bench -m m.gguf --threads 2 \\
      --compare 'bench/peer/llama_bench.py {model} --tests {tests} --threads {threads} --gen-tokens {gen}'

Fetches the prebuilt libraries of llama.cpp v0.5.0 (npm package @node-llama-cpp/linux-x64 3.22.1, checked by its SHA-256)
into a cache on first use and drives them through ctypes. "At its best" means: a persistent thread pool is attached, as
llama.cpp's own tools do (without one it starts threads for every graph), and every test runs with and without weight
repacking, in turn, and reports the better. Test names are those of `muser bench`: pp512, tg@2048, rows8@0, draft8@0.
Prints one JSON object on standard output. Needs Python 3.9 and, for the first run, npm.

With --gpu-layers N the last N layers are on the card and the rest in memory: beside `muser bench --devices` with as many bytes on
the card. Prompts are then read by the card, too, as is llama.cpp's default.

With --gpu all layers are on the card (the same release's CUDA 13.1 build) and the choices tried are physical batches of 512
and 2,048 rows. A driver older than that build cannot translate its portable code: native_cuda.py beside this file makes a
folder of libraries with machine code for one card, for --libraries.
"""
import argparse
import ctypes as C
import hashlib
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

VERSION = "3.22.1"
# Package, checksum, folder in the package, what stands in the libraries' names.
CPU = ("@node-llama-cpp/linux-x64", "0d953e1503d5ab4608d8ed5b739132308c81ac05ffeb760d2a7f30e08a9f90e0", "linux-x64", "")
GPU = ("@node-llama-cpp/linux-x64-cuda", "d6cd3ff39a43b024816952e0bc6452d6711608d26256ff6eb0fe8cf7ff55bb2c", "linux-x64-cuda", "cuda.")
LLAMA = "0.5.0-dev"

int32, uint32, float32, boolean, pointer = C.c_int32, C.c_uint32, C.c_float, C.c_bool, C.c_void_p


def library_folder(build):
    """The unpacked libraries of a build; fetched by name and checksum when they are not there."""
    package, sha256, inside, part = build
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.path.join(cache, "muser-bench", f"llama-{part}{VERSION}")
    if os.path.exists(os.path.join(folder, f"libllama.{part}v0.5.0.so")):
        return folder
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with tempfile.TemporaryDirectory(dir=os.path.dirname(folder)) as work:
        subprocess.run(["npm", "pack", "--silent", f"{package}@{VERSION}"], cwd=work, check=True, stdout=subprocess.DEVNULL)
        archives = [name for name in os.listdir(work) if name.endswith(".tgz")]
        if len(archives) != 1:
            sys.exit(f"npm pack {package}: expected one archive, found {archives}")
        archive = os.path.join(work, archives[0])
        digest = hashlib.sha256()
        with open(archive, "rb") as file:
            for piece in iter(lambda: file.read(1 << 20), b""):
                digest.update(piece)
        if digest.hexdigest() != sha256:
            sys.exit(f"{package}@{VERSION}: expected SHA-256 {sha256}, found {digest.hexdigest()}")
        shutil.unpack_archive(archive, work)
        os.rename(os.path.join(work, "package", "bins", inside), folder)
    return folder


def structure(name, *fields):
    return type(name, (C.Structure,), {"_fields_": list(fields)})


def same(type_, names):
    return [(name, type_) for name in names.split()]


# Layouts of v0.5.0; Library.check compares sizes and defaults with them before anything is run.
ModelParams = structure(
    "ModelParams", *same(pointer, "devices overrides"), *same(int32, "n_gpu_layers split_mode load_mode lazy_mode main_gpu"),
    *same(pointer, "tensor_split progress progress_data kv_overrides"),
    *same(boolean, "vocab_only check_tensors use_extra_bufts no_host no_alloc load_mtp"))
ContextParams = structure(
    "ContextParams", *same(uint32, "n_ctx n_batch n_ubatch n_seq_max n_rs_seq n_outputs_max n_outputs_max_per_seq"),
    *same(int32, "n_threads n_threads_batch ctx_type rope_scaling pooling attention flash_attn"),
    *same(float32, "rope_base rope_scale yarn_ext yarn_attn yarn_fast yarn_slow"), ("yarn_orig", uint32), ("defrag", float32),
    *same(pointer, "cb_eval cb_eval_data"), *same(int32, "type_k type_v"), *same(pointer, "abort abort_data"),
    *same(boolean, "embeddings offload_kqv no_perf op_offload swa_full kv_unified"), ("samplers", pointer),
    ("n_samplers", C.c_size_t), ("other", pointer))
Batch = structure("Batch", ("n_tokens", int32), *same(pointer, "token embd pos n_seq_id seq_id logits"))
PoolParams = structure("PoolParams", ("cpumask", boolean * 512), *same(int32, "n_threads prio"), ("poll", uint32),
                       *same(boolean, "strict_cpu paused"))
LogCallback = C.CFUNCTYPE(None, C.c_int, C.c_char_p, pointer)


class Library:
    """The shared libraries with the prototypes that are used here."""

    PROTOTYPES = {
        "version": (C.c_char_p, []), "log_set": (None, [LogCallback, pointer]), "backend_init": (None, []),
        "model_default_params": (ModelParams, []), "context_default_params": (ContextParams, []),
        "model_load_from_file": (pointer, [C.c_char_p, ModelParams]), "model_free": (None, [pointer]),
        "model_get_vocab": (pointer, [pointer]), "vocab_n_tokens": (int32, [pointer]),
        "init_from_model": (pointer, [pointer, ContextParams]), "free": (None, [pointer]),
        "get_memory": (pointer, [pointer]), "memory_clear": (None, [pointer, boolean]),
        "memory_seq_rm": (boolean, [pointer, int32, int32, int32]),
        "decode": (int32, [pointer, Batch]), "synchronize": (None, [pointer]),
        "attach_threadpool": (None, [pointer, pointer, pointer]), "print_system_info": (C.c_char_p, []),
    }

    def __init__(self, folder, part):
        load = lambda name: C.CDLL(os.path.join(folder, name), mode=C.RTLD_GLOBAL)
        self.base, self.ggml, self.llama = load("libggml-base.so"), load(f"libggml.{part}v0.5.0.so"), load(f"libllama.{part}v0.5.0.so")
        for name, (result, arguments) in self.PROTOTYPES.items():
            function = getattr(self.llama, "llama_" + name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self.quiet = LogCallback(lambda level, text, _: sys.stderr.buffer.write(text) if level == 4 else None)
        self.log_set(self.quiet, None)
        self.check()
        self.ggml.ggml_backend_load_all_from_path.argtypes = [C.c_char_p]
        self.ggml.ggml_backend_load_all_from_path(folder.encode())
        self.backend_init()

    def check(self):
        version, model, context = self.version().decode(), self.model_default_params(), self.context_default_params()
        right = (
            version == LLAMA and C.sizeof(ModelParams) == 80 and C.sizeof(ContextParams) == 160
            and (model.n_gpu_layers, model.split_mode, model.load_mode, model.lazy_mode, model.use_extra_bufts) == (-1, 1, -1, 1, True)
            and (context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max, context.n_threads) == (512, 2048, 512, 1, 4)
            and (context.yarn_slow, context.defrag, context.type_k, context.type_v, context.no_perf) == (-1, -1, 1, 1, True))
        if not right:
            sys.exit(f"llama.cpp {version}: the parameter structures are not those of {LLAMA}")

    def thread_pool(self, threads):
        defaults = self.base.ggml_threadpool_params_default
        defaults.restype, defaults.argtypes = PoolParams, [int32]
        params = defaults(threads)
        if (params.n_threads, params.prio, params.poll, params.strict_cpu) != (threads, 0, 50, False):
            sys.exit("llama.cpp: the thread pool's parameters have another layout")
        by_name, address = self.ggml.ggml_backend_reg_by_name, self.base.ggml_backend_reg_get_proc_address
        by_name.restype, by_name.argtypes = pointer, [C.c_char_p]
        address.restype, address.argtypes = pointer, [pointer, C.c_char_p]
        cpu = by_name(b"CPU")
        create = C.CFUNCTYPE(pointer, C.POINTER(PoolParams))(address(cpu, b"ggml_threadpool_new"))
        destroy = C.CFUNCTYPE(None, pointer)(address(cpu, b"ggml_threadpool_free"))
        return create(C.byref(params)), destroy


class Test:
    """A name such as rows8@2048, understood."""

    def __init__(self, name):
        match = re.fullmatch(r"(pp)(\d+)|(tg)@(\d+)|(rows|draft)(\d+)@(\d+)", name)
        if not match:
            sys.exit(f"unknown test {name}: expected ppN, tg@D, rowsN@D or draftN@D")
        self.name = name
        if match[1]:
            self.kind, self.rows, self.depth = "pp", int(match[2]), 0
        elif match[3]:
            self.kind, self.rows, self.depth = "tg", 1, int(match[4])
        else:
            self.kind, self.rows, self.depth = match[5], int(match[6]), int(match[7])
        self.sequences = self.rows if self.kind == "rows" else 1

    def positions(self, steps):
        """Positions that each sequence needs room for."""
        return self.rows if self.kind == "pp" else self.depth + (self.rows if self.kind == "draft" else steps)


class Session:
    """A loaded model with one context for one test."""

    def __init__(self, library, model, test, steps, threads, ubatch):
        self.library, self.test, self.steps = library, test, steps
        self.vocab = library.vocab_n_tokens(library.model_get_vocab(model))
        params = library.context_default_params()
        room = (test.positions(steps) + 255) // 256 * 256
        params.n_ctx, params.n_seq_max = room * test.sequences, test.sequences
        params.n_batch, params.n_ubatch = 2048, ubatch
        params.n_threads = params.n_threads_batch = threads
        self.context = library.init_from_model(model, params) or sys.exit("llama.cpp cannot create a context")
        self.pool, self.destroy_pool = library.thread_pool(threads)
        library.attach_threadpool(self.context, self.pool, self.pool)

    def close(self):
        self.library.free(self.context)
        self.destroy_pool(self.pool)

    def decode(self, rows):
        """rows: (sequence, position, wants logits)."""
        n = len(rows)
        tokens = (int32 * n)(*[(s * 7919 + p * 104729 + 17) % min(self.vocab, 100_000) for s, p, _ in rows])
        positions, counts = (int32 * n)(*[p for _, p, _ in rows]), (int32 * n)(*[1] * n)
        sequences = (int32 * n)(*[s for s, _, _ in rows])
        start = C.addressof(sequences)
        lists = (pointer * n)(*[start + 4 * i for i in range(n)])
        logits = (C.c_int8 * n)(*[int(w) for _, _, w in rows])
        batch = Batch(n, *[C.cast(array, pointer) if array is not None else None
                           for array in (tokens, None, positions, counts, lists, logits)])
        code = self.library.decode(self.context, batch)
        if code:
            sys.exit(f"{self.test.name}: llama_decode returned {code}")
        self.library.synchronize(self.context)

    def prefill(self, sequence, count, last):
        for at in range(0, count, 2048):
            self.decode([(sequence, p, last and p + 1 == count) for p in range(at, min(at + 2048, count))])

    def warm_up(self):
        """Touches every weight and starts the threads."""
        for rows in (4, 1):
            self.decode([(0, row, row + 1 == rows) for row in range(rows)])
            self.library.memory_clear(self.library.get_memory(self.context), False)

    def run(self, steps):
        """Seconds of each timed step."""
        test, memory = self.test, self.library.get_memory(self.context)
        self.library.memory_clear(memory, False)
        if test.kind == "pp":
            start = time.perf_counter()
            self.prefill(0, test.rows, True)
            return [time.perf_counter() - start]
        for sequence in range(test.sequences):
            self.prefill(sequence, test.depth, False)
        times = []
        for step in range(steps):
            if test.kind == "draft":
                rows = [(0, test.depth + row, True) for row in range(test.rows)]
            else:
                rows = [(sequence, test.depth + step, True) for sequence in range(test.sequences)]
            start = time.perf_counter()
            self.decode(rows)
            times.append(time.perf_counter() - start)
            if test.kind == "draft":
                self.library.memory_seq_rm(memory, 0, test.depth, -1)
        return times


def measure(library, path, tests, options, choice):
    """Results of all tests with one loaded model, and the seconds that loading took."""
    params = library.model_default_params()
    params.n_gpu_layers = options.gpu_layers if options.gpu_layers is not None else -1 if options.gpu else 0
    params.use_extra_bufts = choice.get("repack", True)
    start = time.perf_counter()
    model = library.model_load_from_file(path.encode(), params) or sys.exit(f"llama.cpp cannot load {path}")
    load_s = time.perf_counter() - start
    results = {}
    for test in tests:
        session = Session(library, model, test, options.gen_tokens, options.threads, choice.get("ubatch", 512))
        session.warm_up()
        reps = []
        for _ in range(options.reps):
            times = session.run(options.gen_tokens)
            step = statistics.median(times)
            per_step = test.rows
            reps.append({"tok_s": round(per_step / step, 3), "median_ms": round(1e3 * step, 4), "best_ms": round(1e3 * min(times), 4)})
        session.close()
        results[test.name] = {
            "test": test.name, "tok_s": statistics.median(r["tok_s"] for r in reps),
            "median_ms": statistics.median(r["median_ms"] for r in reps), **choice, "reps": reps}
        print(f"llama.cpp {test.name}: {results[test.name]['tok_s']:.2f} tok/s {choice}", file=sys.stderr)
    library.model_free(model)
    return results, load_s


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tests", default="pp512,tg@0", help="names, separated by commas")
    parser.add_argument("--gen-tokens", type=int, default=32, help="timed steps of all tests but ppN")
    parser.add_argument("--reps", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--gpu", action="store_true", help="all layers on the card")
    parser.add_argument("--gpu-layers", type=int, metavar="N", help="the last N layers on the card, the others in memory")
    parser.add_argument("--libraries", help="a folder with the libraries, instead of those of the package")
    parser.add_argument("--repack", choices=("on", "off", "best"), default="best")
    options = parser.parse_args()
    options.gpu = options.gpu or options.gpu_layers is not None
    tests = [Test(name) for name in options.tests.split(",") if name]
    build = GPU if options.gpu else CPU
    library = Library(options.libraries or library_folder(build), build[3])
    repack = {"on": [True], "off": [False], "best": [False, True]}[options.repack]
    choices = [{"ubatch": 512}, {"ubatch": 2048}] if options.gpu else [{"repack": choice} for choice in repack]
    best, loads = {}, {}
    for choice in choices:
        results, seconds = measure(library, options.model, tests, options, choice)
        loads[f"ubatch {choice['ubatch']}" if options.gpu else "repacked" if choice["repack"] else "mapped"] = seconds
        for name, result in results.items():
            if name not in best or result["tok_s"] > best[name]["tok_s"]:
                best[name] = result
    print(json.dumps({
        "engine": "llama.cpp", "commit": f"v{library.version().decode()}, {build[0]} {VERSION}",
        "device": f"{options.gpu_layers} layers on the card, {options.threads} threads" if options.gpu_layers is not None
        else "the card" if options.gpu else f"{platform.processor() or platform.machine()}, {options.threads} threads",
        "system": library.print_system_info().decode().strip(), "bandwidth": None, "model": os.path.basename(options.model),
        "load_s": {name: round(seconds, 2) for name, seconds in loads.items()},
        "tests": [best[test.name] for test in tests]}))


if __name__ == "__main__":
    main()
