//! Products of few rows (`product_few`): Q4_K and Q5_K in the file's layout, whose blocks are whole words of 16 bytes.
//!
//! Eight lanes have a weight row: lane `j` owns 32 values of k of each super-block and scatters the sums of up to eight activation
//! rows over the lanes by shuffles; lane `j` then carries the chain of row `j`. Works from subgroups of eight on. The text is written
//! here because it is unrolled: by activation rows and by weight rows.

use std::fmt::Write as _;

use muser_gguf::GgmlType;

use crate::text::{Constant, Source};

/// Most rows of a step whose products leave a sum for each K segment: consumers add them up.
pub(crate) const FEW_ROWS: u32 = 16;
/// Activation rows of a workgroup, by the kernels that there are.
pub(crate) const TOKENS: [u32; 4] = [1, 2, 4, 8];
/// Groups of 32 lanes of a workgroup.
const WARPS: u32 = 2;

/// Weight rows that eight lanes have side by side.
fn rows(tokens: u32) -> u32 {
    if tokens <= 2 { 2 } else { 4 }
}

/// Weight rows of a workgroup.
pub(crate) fn tile(tokens: u32) -> u32 {
    4 * rows(tokens) * WARPS
}

/// Is there such a kernel for a type, on a device with such subgroups?
pub(crate) fn takes(ty: GgmlType, subgroups: (u32, u32)) -> bool {
    matches!(ty, GgmlType::Q4_K | GgmlType::Q5_K) && subgroups.0 >= 8
}

const HEAD: &str = "
struct P { zero: u32, row_bytes: u32, rows: u32, blocks: u32, segments: u32, width: u32, first_row: u32, count_at: u32, small_at: u32, scale: f32 }
@group(0) @binding(0) var<uniform> p: P;
@group(0) @binding(1) var<storage, read> step: array<u32>;
@group(0) @binding(2) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> figures: array<u32>;
@group(0) @binding(5) var<storage, read_write> out: array<f32>;
fn dot16(a: vec4<u32>, b: vec4<u32>) -> i32 { return dot4(a.x, b.x) + dot4(a.y, b.y) + dot4(a.z, b.z) + dot4(a.w, b.w); }
fn byte(v: u32, i: u32) -> i32 { return i32((v >> (8u * i)) & 255u); }
fn sum_at(i: u32) -> i32 { return bitcast<i32>(figures[i]); }
";

/// The kernel for up to `tokens` activation rows.
pub(crate) fn source(ty: GgmlType, tokens: u32) -> Source {
    let (rows, five) = (rows(tokens), ty == GgmlType::Q5_K);
    let words = ty.block_bytes() / 16;
    let mut s = HEAD.to_owned();
    let _ = writeln!(
        s,
        "@compute @workgroup_size({}) fn main(@builtin(workgroup_id) g: vec3<u32>, @builtin(local_invocation_index) l: u32) {{
  let j = l & 7u; let c = j >> 1u; let half_at = j & 1u; let own = j & {}u; let count = step[p.count_at]; let token0 = g.z * {tokens}u;
  let b0 = p.blocks * g.y / p.segments; let b1 = p.blocks * (g.y + 1u) / p.segments;
  let first = (g.x * {WARPS}u + l / 32u) * {}u + ((l >> 3u) & 3u);
  let own_token = min(token0 + own, count - 1u);",
        32 * WARPS,
        tokens - 1,
        4 * rows
    );
    for t in 0..rows {
        let _ = writeln!(
            s,
            "  var acc{t} = nothing(); let row{t} = min(first + {}u, p.rows - 1u) * p.blocks;",
            4 * t
        );
    }
    for r in 0..tokens {
        let _ = writeln!(s, "  let x{r} = min(token0 + {r}u, count - 1u) * p.blocks;");
    }
    s += "  for (var b = b0; b < b1; b++) {\n";
    for t in 0..rows {
        let (qs, fifth) =
            if five { (3, format!(" let f{t} = weights[a{t} + 1u + half_at];")) } else { (1, String::new()) };
        let _ = writeln!(
            s,
            "    let a{t} = (row{t} + b) * {words}u; let h{t} = weights[a{t}]; let q{t} = weights[a{t} + {qs}u + j];{fifth}"
        );
    }
    for r in 0..tokens {
        let _ = writeln!(
            s,
            "    let k{r} = (x{r} + b) * 16u + 4u * c + half_at; let lo{r} = codes[k{r}]; let hi{r} = codes[k{r} + 2u];"
        );
    }
    s += "    let z = own_token * 17u * p.blocks; let dx = bitcast<f32>(figures[z + b]); let m0 = z + p.blocks + b * 8u;\n";
    s += "    let y = vec4(sum_at(m0), sum_at(m0 + 1u), sum_at(m0 + 2u), sum_at(m0 + 3u));\n";
    s += "    let v = vec4(sum_at(m0 + 4u), sum_at(m0 + 5u), sum_at(m0 + 6u), sum_at(m0 + 7u));\n";
    (0..rows).for_each(|t| weight_row(&mut s, t, tokens, five));
    let _ = writeln!(s, "  }}\n  if (j < {tokens}u && token0 + j < count) {{");
    for t in 0..rows {
        let at = format!("first + {}u", 4 * t);
        let _ = writeln!(
            s,
            "    if ({at} < p.rows) {{ out[(g.y * count + token0 + j) * p.width + p.first_row + {at}] = acc{t}; }}"
        );
    }
    s += "  }\n}\n";
    let name = format!("product_few/{}", ty.name());
    Source::new(&name, &[("TOKENS", Constant::Number(tokens))], &[&s])
}

/// One weight row of eight lanes: sums of all activation rows, scattered over the lanes, and the two steps of the own chain.
fn weight_row(s: &mut String, t: u32, tokens: u32, five: bool) {
    let (low, high) = if five {
        let bit = |n: u32| format!(" | (((f{t} >> vec4(2u * c + {n}u)) & vec4(0x01010101u)) << vec4(4u))");
        (bit(0), bit(1))
    } else {
        (String::new(), String::new())
    };
    let _ = writeln!(
        s,
        "    {{ let h = h{t}; let low = (q{t} & vec4(0x0f0f0f0fu)){low}; let high = ((q{t} >> vec4(4u)) & vec4(0x0f0f0f0fu)){high};
      let ml = h.z & 0x3f3f3f3fu; let mh = ((h.w >> 4u) & 0x0f0f0f0fu) | ((h.z >> 2u) & 0x30303030u);
      let sc = select((h.w & 0x0f0f0f0fu) | ((h.y >> 2u) & 0x30303030u), h.y & 0x3f3f3f3fu, c < 2u) >> (16u * (c & 1u));"
    );
    for r in 0..tokens {
        let _ = writeln!(
            s,
            "      var i{r} = byte(sc, 0u) * dot16(low, lo{r}) + byte(sc, 1u) * dot16(high, hi{r});"
        );
    }
    let (mut width, mut bit) = (tokens, 1);
    // Keep what this lane's bit says, give the rest away.
    while width > 1 {
        let _ = writeln!(s, "      let o{bit} = (j & {bit}u) != 0u;");
        for r in 0..width / 2 {
            let (a, b) = (2 * r, 2 * r + 1);
            let _ = writeln!(
                s,
                "      i{r} = select(i{a}, i{b}, o{bit}) + subgroupShuffleXor(select(i{b}, i{a}, o{bit}), {bit}u);"
            );
        }
        (width, bit) = (width / 2, bit * 2);
    }
    while bit < 8 {
        let _ = writeln!(s, "      i0 += subgroupShuffleXor(i0, {bit}u);");
        bit *= 2;
    }
    let _ = writeln!(
        s,
        "      let m = byte(ml, 0u) * y.x + byte(ml, 1u) * y.y + byte(ml, 2u) * y.z + byte(ml, 3u) * y.w
        + byte(mh, 0u) * v.x + byte(mh, 1u) * v.y + byte(mh, 2u) * v.z + byte(mh, 3u) * v.w;
      acc{t} = exact_fma(f32(i0), mul(half(h.x & 0xffffu), dx), acc{t});
      acc{t} = exact_fma(negated(f32(m)), mul(half(h.x >> 16u), dx), acc{t}); }}"
    );
}
