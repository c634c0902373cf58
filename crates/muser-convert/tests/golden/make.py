#!/usr/bin/env python3
"""Make the quantised checkpoints that the tests of muser-convert read, with the public libraries.

    make.py OUT_DIR        writes compressed-tensors/ and modelopt/: a checkpoint each, and expected.safetensors

One random model of one layer is quantised by llm-compressor into all kinds of matrices that it writes, and by ModelOpt
into those that that one writes. expected.safetensors holds token ids, the logits of transformers in f64 on the weights as
the library itself dequantises them, and a hash of each matrix (see `digest`). Needs torch, transformers 5.24.0,
llmcompressor 0.14.0, compressed-tensors 0.20.1, nvidia-modelopt 0.47.0.
"""
import atexit
import json
import os
import re
import shutil
import sys
import tempfile
import warnings
from unittest.mock import patch

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import MuseGlimmerConfig, MuseGlimmerForConditionalGeneration
from transformers.models.muse_glimmer import modeling_muse_glimmer as mod

warnings.filterwarnings("ignore")
VOCAB, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 24, 2, 1, 32, 64
LAYER = "model.language_model.layers.0."
SIZES = {"compressed-tensors": 160, "modelopt": 64}


def model(ffn):
    torch.manual_seed(5)
    text = dict(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=ffn, num_hidden_layers=1,
                num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, sliding_window=16,
                max_position_embeddings=64, layer_types=["sliding_attention"], layer_rope_theta=[10000.0],
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, bos_token_id=0, eos_token_id=1,
                qk_scale_factor=2.5, output_multiplier=2.0)
    vision = dict(hidden_size=4, intermediate_size=4, num_attention_heads=1, num_hidden_layers=1, pos_emb_height=1,
                  pos_emb_width=1, max_position_embeddings=1, patch_size=2)
    c = MuseGlimmerConfig(text_config=text, vision_config=vision, out_hidden_size=16, projector_hidden_size=4,
                          image_token_id=22, video_token_id=23)
    c._attn_implementation = "eager"
    m = MuseGlimmerForConditionalGeneration(c)
    with torch.no_grad():
        for name, p in m.named_parameters():
            if name.endswith("layernorm.weight"):
                p.copy_(0.2 * torch.randn(p.shape))
            elif name.endswith("norm.weight"):
                p.copy_(1 + 0.2 * torch.randn(p.shape))
            elif p.dim() == 2:
                # Heavy tails, so that block scales differ by octaves, and a spread of its own for each matrix.
                spread = 0.05 + 0.2 * torch.rand(())
                p.copy_(spread * torch.randn(p.shape) * torch.exp(0.6 * torch.randn(p.shape)))
    return m.to(torch.bfloat16).eval()


def logits(m, ids):
    """The same modules in f64 throughout: transformers computes norms, RoPE and softmax in f32 whatever the dtype."""
    def rms(self, x):
        y = x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        if isinstance(self, mod.MuseGlimmerTextCenteredRMSNorm):
            return y * (1 + self.weight)
        return y * self.weight if self.with_scale else y

    def rope(self, x, pos):
        a = pos[..., None].double() * 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
        return torch.cat((a, a), -1).cos(), torch.cat((a, a), -1).sin()

    def attend(module, q, k, v, mask, scaling, **_):
        k, v = mod.repeat_kv(k, module.num_key_value_groups), mod.repeat_kv(v, module.num_key_value_groups)
        return (torch.softmax(q @ k.transpose(2, 3) * scaling + mask, -1) @ v).transpose(1, 2), None

    with patch.object(mod.MuseGlimmerRMSNorm, "forward", rms), \
            patch.object(mod.MuseGlimmerTextCenteredRMSNorm, "forward", rms), \
            patch.object(mod.MuseGlimmerTextRotaryEmbedding, "forward", rope), \
            patch.object(mod, "eager_attention_forward", attend), torch.no_grad():
        return m.double()(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().numpy()


def pairs(w, name):
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-1])
    return w if heads is None else w.reshape(heads, 2, HEAD_DIM // 2, -1).transpose(1, 2).reshape(w.shape)


def digest(w, name, dtype):
    """FNV-1a of a matrix with its rows as in the GGUF file: of NVFP4 code times block scale in f32, of others the weights in bf16."""
    state = 0xCBF29CE484222325
    if dtype == torch.float32:
        w = w + 0.0  # zero has a sign in one library's decoder only
    for byte in pairs(w, name).to(dtype).contiguous().view(torch.uint8).numpy().tobytes():
        state = ((state ^ byte) * 0x100000001B3) & (2**64 - 1)
    return f"{state:016x}"


def finish(out, m, weights, digests):
    """Logits on the dequantised weights; only what a text model needs is kept of the checkpoint."""
    clean = model(m.config.text_config.intermediate_size).double()
    state = clean.state_dict()
    for name, w in weights.items():
        assert state[name + ".weight"].shape == w.shape
        state[name + ".weight"] = w.double()
    path = os.path.join(out, "model.safetensors")
    with safe_open(path, "pt") as f:
        kept = {k: f.get_tensor(k) for k in f.keys() if ".vision_" not in k}
    # One library rounds the norms on its way.
    state |= {k: v.double() for k, v in kept.items() if k.endswith("norm.weight")}
    clean.load_state_dict(state)
    ids = [0] + [int(i) for i in np.random.default_rng(3).integers(2, VOCAB - 2, 39)]
    save_file(kept, path)
    save_file({"ids": torch.tensor(ids, dtype=torch.int32), "logits": torch.from_numpy(logits(clean, ids))},
              os.path.join(out, "expected.safetensors"), metadata=digests)
    tokens = {f"t{i}": i for i in range(VOCAB - 2)}
    json.dump({"added_tokens": [{"id": i, "content": f"<|{i}|>", "special": True} for i in (VOCAB - 2, VOCAB - 1)],
               "model": {"type": "BPE", "vocab": tokens, "merges": []}}, open(os.path.join(out, "tokenizer.json"), "w"))
    config = json.load(open(os.path.join(out, "config.json")))
    json.dump(config, open(os.path.join(out, "config.json"), "w"), separators=(",", ":"))
    for name in os.listdir(out):
        if name not in ("model.safetensors", "config.json", "hf_quant_config.json", "tokenizer.json", "expected.safetensors"):
            os.remove(os.path.join(out, name))


def reloaded(m, out):
    """The libraries want models that came out of a folder."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    m.save_pretrained(folder)
    m = MuseGlimmerForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16)
    m.config._attn_implementation = "eager"
    return m


def compressed_tensors(out):
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    m = reloaded(model(SIZES["compressed-tensors"]), out)

    def group(targets, **args):
        return QuantizationScheme(targets=[f"re:.*{t}$" for t in targets], weights=QuantizationArgs(type="float", **args))

    nvfp4 = dict(num_bits=4, strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn, zp_dtype=torch.float8_e4m3fn)
    # Products that are read together have to be of one kind, says the library.
    groups = {
        "nvfp4": group(["q_proj", "k_proj", "v_proj", "mlp.gate_proj", "up_proj"], **nvfp4),
        "tensor": group(["lm_head"], num_bits=8, strategy="tensor"),
        "channel": group(["self_attn.gate_proj"], num_bits=8, strategy="channel"),
        "block": group(["down_proj"], num_bits=8, strategy="block", block_structure=[128, 128]),
        "mxfp8": group(["o_proj"], num_bits=8, strategy="group", group_size=32, scale_dtype=torch.uint8, zp_dtype=torch.uint8),
    }
    oneshot(model=m, recipe=QuantizationModifier(config_groups=groups, ignore=["re:.*vision.*"]))
    m.save_pretrained(out, save_compressed=True)
    weights, digests = {}, {}
    config = json.load(open(os.path.join(out, "config.json")))
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    with safe_open(os.path.join(out, "model.safetensors"), "pt") as f:
        for key in f.keys():
            if key.endswith(".weight_packed"):
                name = key.removesuffix(".weight_packed")
                packed, scale = f.get_tensor(key), f.get_tensor(name + ".weight_scale").float()
                divisor = f.get_tensor(name + ".weight_global_scale")
                codes = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], torch.float32)
                product = codes * scale.repeat_interleave(16, 1)
                digests[name] = digest(product, name, torch.float32)
                weights[name] = product.double() / divisor.double()
            elif key.endswith(".weight_scale") and name_of(key) + ".weight" in f.keys():
                name = name_of(key)
                w, scale = f.get_tensor(name + ".weight"), f.get_tensor(key)
                scheme = next(g for g in groups.values() if any(re.match(t[3:], name) for t in g.targets))
                weights[name] = library_dequantised(w, scale if scale.dtype == torch.uint8 else scale.float(), scheme)
                digests[name] = digest(weights[name], name, torch.bfloat16)
    finish(out, m, weights, digests)


def name_of(key):
    return key.removesuffix(".weight_scale")


def library_dequantised(w, scale, scheme):
    from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
    from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
    kind = MXFP8QuantizationCompressor if scale.dtype == torch.uint8 else NaiveQuantizationCompressor
    return kind.decompress({"weight": w, "weight_scale": scale}, scheme)["weight"].to(torch.bfloat16)


def modelopt(out):
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor
    m = reloaded(model(SIZES["modelopt"]), out)
    nvfp4 = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
    mxfp8 = {"num_bits": (4, 3), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}}
    kinds = {"q_proj": nvfp4, "k_proj": nvfp4, "v_proj": nvfp4, "mlp.gate_proj": nvfp4, "up_proj": nvfp4, "o_proj": mxfp8,
             "down_proj": {"num_bits": (4, 3), "axis": None}}
    rules = [{"quantizer_name": "*", "enable": False}]
    rules += [{"quantizer_name": f"*layers.0*{name}.weight_quantizer", "cfg": kind} for name, kind in kinds.items()]
    rules += [{"quantizer_name": "*vision*", "enable": False}]
    loop = lambda m: m(input_ids=torch.arange(2, 20)[None])
    m = mtq.quantize(m, {"quant_cfg": rules, "algorithm": "max"}, loop)
    export_hf_checkpoint(m, export_dir=out)
    weights, digests = {}, {}
    with safe_open(os.path.join(out, "model.safetensors"), "pt") as f:
        keys = [key for key in f.keys() if key.endswith(".weight_scale")]
        for key in keys:
            name = name_of(key)
            w, scale = f.get_tensor(name + ".weight"), f.get_tensor(key)
            if w.dtype == torch.uint8:
                shape, one = (w.shape[0], 2 * w.shape[1]), torch.ones(())
                q = NVFP4QTensor(shape, torch.float32, w)
                product = q.dequantize(scale=scale, double_scale=one, block_sizes={-1: 16})
                digests[name] = digest(product, name, torch.float32)
                weights[name] = product.double() * f.get_tensor(name + ".weight_scale_2").double()
                continue
            kind = MXFP8QTensor if scale.dtype == torch.uint8 else FP8QTensor
            # In f32, so that the scale is not rounded before the product is.
            weights[name] = kind(w.shape, torch.float32, w).dequantize(dtype=torch.float32, scale=scale).to(torch.bfloat16)
            digests[name] = digest(weights[name], name, torch.bfloat16)
    finish(out, m, weights, digests)


if __name__ == "__main__":
    base = sys.argv[1]
    for name, make in (("compressed-tensors", compressed_tensors), ("modelopt", modelopt)):
        if len(sys.argv) > 2 and sys.argv[2] != name:
            continue
        os.makedirs(os.path.join(base, name), exist_ok=True)
        make(os.path.join(base, name))
