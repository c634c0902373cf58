//! The kernel files, how they are compiled for an architecture, and the argument structures of their kernels.
//!
//! The structures mirror those of the `.cu` files field by field (`repr(C)`, same names); device pointers are `u64`.

use muser_backend::arith::attention::Digits;

/// One `.cu` file.
#[derive(Debug)]
pub struct KernelFile {
    /// File name without `.cu`.
    pub name: &'static str,
    /// Its text.
    pub source: &'static str,
    /// Kernels in it.
    pub kernels: &'static [&'static str],
    /// Uses instructions of one architecture alone (its number); other cards do without the file.
    pub only_for: Option<u32>,
}

/// Headers that the files include.
pub const HEADERS: [(&str, &str); 12] = [
    ("attention_wide.cuh", include_str!("../kernels/attention_wide.cuh")),
    ("tower_attention.cuh", include_str!("../kernels/tower_attention.cuh")),
    ("attention_digits.cuh", include_str!("../kernels/attention_digits.cuh")),
    ("heads.cuh", include_str!("../kernels/heads.cuh")),
    ("attention.cuh", include_str!("../kernels/attention.cuh")),
    ("barriers.cuh", include_str!("../kernels/barriers.cuh")),
    ("blocks.cuh", include_str!("../kernels/blocks.cuh")),
    ("common.cuh", include_str!("../kernels/common.cuh")),
    ("digits.cuh", include_str!("../kernels/digits.cuh")),
    ("tiles.cuh", include_str!("../kernels/tiles.cuh")),
    ("wgmma.cuh", include_str!("../kernels/wgmma.cuh")),
    ("wgmma_regs.cuh", include_str!("../kernels/wgmma_regs.cuh")),
];

/// All kernel files.
pub const FILES: [KernelFile; 16] = [
    KernelFile {
        name: "matmul_few",
        source: include_str!("../kernels/matmul_few.cu"),
        kernels: &[
            "few_q4k_1",
            "few_q4k_8",
            "few_q4k_16",
            "few_q5k_1",
            "few_q5k_8",
            "few_q5k_16",
            "few_q6k_1",
            "few_q6k_8",
            "few_q6k_16",
            "few_nv4_1",
            "few_nv4_8",
            "few_nv4_16",
            "few_q80_1",
            "few_q80_8",
            "few_q80_16",
            "few_q4k_q6k_1",
            "few_q4k_q6k_8",
            "few_q4k_q6k_16",
        ],
        only_for: None,
    },
    KernelFile {
        name: "matmul_many",
        source: include_str!("../kernels/matmul_many.cu"),
        kernels: &["many_q4k", "many_q5k", "many_q6k", "many_nv4", "many_q80"],
        only_for: None,
    },
    KernelFile {
        name: "matmul_wide",
        source: include_str!("../kernels/matmul_wide.cu"),
        kernels: &[
            "split_q4k",
            "split_q5k",
            "split_q6k",
            "split_nv4",
            "round_q4k",
            "round_q5k",
            "round_q6k",
            "wide_q4k",
            "wide_q5k",
            "wide_q6k",
            "wide_nv4",
            "wide_rounded",
        ],
        only_for: Some(90),
    },
    KernelFile {
        name: "matmul_fused",
        source: include_str!("../kernels/matmul_fused.cu"),
        kernels: &[
            "fused_q4k_32",
            "fused_q4k_64",
            "fused_q4k_128",
            "fused_q5k_32",
            "fused_q5k_64",
            "fused_q5k_128",
            "fused_q6k_32",
            "fused_q6k_64",
            "fused_q6k_128",
            "fused_nv4_32",
            "fused_nv4_64",
            "fused_nv4_128",
        ],
        only_for: Some(90),
    },
    KernelFile {
        name: "matmul_any",
        source: include_str!("../kernels/matmul_any.cu"),
        kernels: &["any_super_1", "any_super_8", "any_small_1", "any_small_8", "any_float_1", "any_float_8"],
        only_for: None,
    },
    KernelFile {
        name: "attention_combine",
        source: include_str!("../kernels/attention_combine.cu"),
        kernels: &["digits_combine", "digits_gate"],
        only_for: None,
    },
    KernelFile {
        name: "attention_digits",
        source: include_str!("../kernels/attention_digits.cu"),
        kernels: &["digits_split_1", "digits_split_2", "digits_many_1", "digits_many_2", "kv_transpose"],
        only_for: None,
    },
    KernelFile {
        name: "attention_wide",
        source: include_str!("../kernels/attention_wide.cu"),
        kernels: &["digits_wide_1", "digits_wide_2"],
        only_for: Some(90),
    },
    KernelFile {
        name: "matmul_float",
        source: include_str!("../kernels/matmul_float.cu"),
        kernels: &["many_f32", "many_f16", "many_bf16"],
        only_for: None,
    },
    KernelFile {
        name: "tower",
        source: include_str!("../kernels/tower.cu"),
        kernels: &[
            "tower_patches",
            "tower_embed",
            "tower_norm",
            "tower_norm_6",
            "tower_merge",
            "tower_gelu",
            "tower_rows",
            "tower_heads",
            "tower_values",
        ],
        only_for: None,
    },
    KernelFile {
        name: "tower_attention",
        source: include_str!("../kernels/tower_attention.cu"),
        kernels: &["tower_attend_64", "tower_attend_96", "tower_attend_128"],
        only_for: None,
    },
    KernelFile {
        name: "tower_attention_wide",
        source: include_str!("../kernels/tower_attention_wide.cu"),
        kernels: &[
            "tower_attend_wide_64",
            "tower_attend_wide_96",
            "tower_attend_wide_128",
            "tower_attend_whole_64",
            "tower_attend_whole_96",
            "tower_attend_whole_128",
        ],
        only_for: Some(90),
    },
    KernelFile {
        name: "rows",
        source: include_str!("../kernels/rows.cu"),
        kernels: &[
            "embed_rows",
            "norm_rows",
            "norm_cut",
            "silu_rows",
            "rope_digits_1",
            "rope_digits_2",
            "logit_rows",
            "quantise",
            "plain_read",
        ],
        only_for: None,
    },
    KernelFile {
        name: "draft",
        source: include_str!("../kernels/draft.cu"),
        kernels: &["draft_tap", "draft_embed", "draft_norm", "draft_heads_1", "draft_heads_2"],
        only_for: None,
    },
    KernelFile {
        name: "sampling",
        source: include_str!("../kernels/sampling.cu"),
        kernels: &["top_select", "top_merge"],
        only_for: None,
    },
    KernelFile {
        name: "repack",
        source: include_str!("../kernels/repack.cu"),
        kernels: &["repack_q4k", "repack_q5k", "repack_q6k", "repack_nv4", "repack_q80"],
        only_for: None,
    },
];

/// Shared memory of `digits_combine`: 3 stages of 32 partial results of two heads.
pub const COMBINE_RING_BYTES: u32 = 3 * 32 * 260 * 4;

/// Sizes that differ between architectures because shared memory does; none of them changes a bit of any result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Most shared memory of a CTA.
    pub shared_bytes: u32,
    /// Rows (tokens) of a CTA of the many-row product.
    pub tokens: u32,
    /// Row tiles of one of its warps.
    pub warp_row_tiles: u32,
    /// Super-blocks in flight of a CTA.
    pub stages: u32,
    /// Units of a block that the split attention kernel computes side by side.
    pub split_units: u32,
    /// Warps of the many-row attention kernel.
    pub many_warps: u32,
}

impl Tuning {
    /// For compute capability `arch / 10 . arch % 10`.
    pub fn of(arch: u32) -> Self {
        match arch {
            90 | 100 | 101 | 103 | 110 => Self {
                shared_bytes: 227 << 10,
                tokens: 128,
                warp_row_tiles: 2,
                stages: 2,
                split_units: 4,
                many_warps: 8,
            },
            80 | 87 => Self {
                shared_bytes: 163 << 10,
                tokens: 64,
                warp_row_tiles: 2,
                stages: 2,
                split_units: 2,
                many_warps: 8,
            },
            _ => Self {
                shared_bytes: 99 << 10,
                tokens: 32,
                warp_row_tiles: 1,
                stages: 2,
                split_units: 1,
                many_warps: 4,
            },
        }
    }
}

impl Tuning {
    /// Units in flight of the many-row attention kernel.
    pub fn many_stages(&self) -> u32 {
        if self.many_warps > 4 { 3 } else { 2 }
    }

    /// Shared memory that a launch of `digits_split_*` asks for: units, and what comes out of the four of a block.
    pub fn split_shared_bytes(&self, digits: Digits) -> u32 {
        self.split_units * unit_bytes(digits) + 4 * 16 * 132 * 4
    }

    /// Shared memory that a launch of `digits_many_*` or `digits_wide_*` asks for: units, and the sums of each warp.
    pub fn many_shared_bytes(&self, digits: Digits) -> u32 {
        self.many_stages() * unit_bytes(digits) + self.many_warps * 8192
    }
}

/// Shared memory of a unit of attention (`unit_bytes` in `attention_digits.cuh`).
fn unit_bytes(digits: Digits) -> u32 {
    2 * digits.count() as u32 * 8192 + 1024
}

/// An attention kernel of the vision tower.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TowerAttention {
    /// Of the kernel.
    pub name: String,
    /// Warps of a CTA; each has 16 patches.
    pub warps: u32,
    stages: u32,
    dim: u32,
}

impl TowerAttention {
    /// Those that an architecture has for heads of so many values, the best one first. All give the same bits.
    pub fn of(arch: u32, head_dim: usize) -> Vec<Self> {
        let dim = [64, 96, 128].into_iter().find(|dim| head_dim <= *dim as usize).unwrap_or(128);
        let tuning = Tuning::of(arch);
        let plain = ("tower_attend", tuning.many_warps, tuning.many_stages());
        let hopper = [("tower_attend_wide", 4, 2), ("tower_attend_whole", 8, 3), plain];
        let all = if arch == 90 { &hopper[..] } else { &hopper[2..] };
        all.iter()
            .map(|(name, warps, stages)| Self {
                name: format!("{name}_{dim}"),
                warps: *warps,
                stages: *stages,
                dim,
            })
            .collect()
    }

    /// Shared memory that a launch asks for: units, and the sums of each warp.
    pub fn shared_bytes(&self) -> u32 {
        self.stages * unit_bytes(Digits::Two) + self.warps * 64 * self.dim
    }
}

impl KernelFile {
    /// Does the file run on this architecture?
    pub fn supports(&self, arch: u32) -> bool {
        self.only_for.is_none_or(|only| only == arch)
    }

    /// Compiler options besides the target.
    pub fn options(&self, arch: u32) -> Vec<String> {
        let mut options: Vec<String> =
            ["--std=c++17", "--fmad=false", "--ptxas-options=-v"].map(str::to_owned).into();
        let tuning = Tuning::of(arch);
        match self.name {
            "matmul_many" => {
                options.push(format!("-DTOKENS={}", tuning.tokens));
                options.push(format!("-DWARP_ROW_TILES={}", tuning.warp_row_tiles));
                options.push(format!("-DSTAGES={}", tuning.stages));
            }
            "attention_digits" | "tower_attention" => {
                options.push(format!("-DMANY_STAGES={}", tuning.many_stages()));
                options.push(format!("-DSPLIT_UNITS={}", tuning.split_units));
                options.push(format!("-DMANY_WARPS={}", tuning.many_warps));
            }
            _ => {}
        }
        options
    }
}

/// Marks a structure that is passed to a kernel by value.
///
/// # Safety
/// The type is `repr(C)`, equals the kernel's parameter structure and holds no padding that matters.
#[allow(unsafe_code, reason = "the promise that the layouts agree can only be made by hand")]
pub(crate) unsafe trait KernelArgs: Copy {}

macro_rules! args {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $ty:ty),* $(,)? })*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default)]
        pub(crate) struct $name { $(pub(crate) $field: $ty),* }
        // SAFETY: repr(C) and written to match the structure of the same name in kernels/.
        #[allow(unsafe_code, reason = "see KernelArgs")]
        unsafe impl KernelArgs for $name {}
    )*};
}

args! {
    /// Quantised activations.
    Act { q: u64, d: u64, sums: u64, q32: u64, d32: u64, f: u64, k: u32, ld: u32, tiled: u32, _padding: u32 }
    /// `few_*`
    FewArgs {
        w_a: u64, w_b: u64, act: Act, part: u64, tiles_a: u32, tiles_b: u32, kb: u32, segments: u32, n: u32, n_all: u32,
        first_row: u32, out_rows: u32, stages: u32, _padding: u32,
    }
    /// `many_*`
    ManyArgs {
        w: u64, act: Act, out: u64, row_tiles: u32, kb: u32, segments: u32, n: u32, first_row: u32, out_rows: u32,
    }
    /// `split_*`, `round_*`
    SplitArgs { w: u64, digits: u64, scales: u64, row_tiles: u32, kb: u32 }
    /// `wide_*`
    WideArgs {
        w: u64, act: Act, out: u64, row_tiles: u32, kb: u32, segments: u32, n: u32, first_row: u32, out_rows: u32, digits: u64,
    }
    /// `fused_*`
    FusedArgs {
        w: u64, act: Act, part: u64, row_tiles: u32, kb: u32, segments: u32, n: u32, first_row: u32, out_rows: u32,
    }
    /// `any_*`
    AnyArgs {
        w: u64, act: Act, out: u64, row_bytes: u64, type_id: u32, rows: u32, padded_rows: u32, kb: u32, segments: u32,
        out_segments: u32, first_row: u32, out_rows: u32, first: u32, n: u32, n_all: u32, scale: f32,
    }
    /// `many_f32`, `many_f16`, `many_bf16`
    FloatArgs {
        w: u64, x: u64, out: u64, row_bytes: u64, rows: u32, padded_rows: u32, k: u32, out_segments: u32, first_row: u32,
        out_rows: u32, n: u32, scale: f32, _padding: u32,
    }
    /// `embed_rows`
    EmbedArgs {
        table: u64, inputs: u64, embeddings: u64, h: u64, row_bytes: u64, type_id: u32, hidden: u32, eps: f32, factor: f32,
    }
    /// `norm_rows`
    NormArgs {
        part: u64, factors: u64, h: u64, post: u64, w: u64, rows: u64, y: u64, best: u64, act: Act, segments: u32, n: u32, hidden: u32, eps: f32,
        post_eps: f32,
    }
    /// `norm_cut`
    NormCutArgs { norm: NormArgs, cut: u64 }
    /// `silu_rows`
    SiluArgs { part: u64, factors: u64, act: Act, segments: u32, n: u32, ffn: u32 }
    /// `rope_digits_*`
    RopeArgs {
        part: u64, factors: u64, q_norm: u64, k_norm: u64, angles: u64, positions: u64, slots: u64, q: u64, f: u64, kv: u64,
        block_bytes: u64, segments: u32, n: u32, heads: u32, kv_heads: u32, width: u32, k_at: u32, v_at: u32, eps: f32,
        factor: f32,
    }
    /// `logit_rows`
    LogitArgs {
        part: u64, factors: u64, logits: u64, best: u64, segments: u32, n: u32, out_rows: u32, vocab: u32, scale: f32, cap: f32,
    }
    /// `draft_tap`
    DraftTapArgs { h: u64, act: Act, hidden: u32, first_block: u32 }
    /// `draft_embed`
    DraftEmbedArgs { table: u64, inputs: u64, h: u64, row_bytes: u64, type_id: u32, hidden: u32, factor: f32, _padding: u32 }
    /// `draft_norm`
    DraftNormArgs {
        part: u64, factors: u64, h: u64, w: u64, rows: u64, best: u64, act: Act, segments: u32, n: u32, hidden: u32, eps: f32,
    }
    /// `draft_heads_*`
    DraftHeadArgs {
        part: u64, factors: u64, q_norm: u64, k_norms: u64, angles: u64, positions: u64, slots: u64, q: u64, f: u64, kv: u64,
        block_bytes: u64, layer_bytes: u64, segments: u32, n: u32, width: u32, heads: u32, kv_heads: u32, layers: u32,
        k_at: u32, v_at: u32, eps: f32, factor: f32,
    }
    /// `top_select`, `top_merge`
    SelectArgs { logits: u64, counts: u64, chosen: u64, sorted: u64, vocab: u32, chunks: u32, most: u32, _padding: u32 }
    /// `quantise`
    QuantiseArgs { x: u64, act: Act }
    /// `plain_read`
    ReadArgs { p: u64, n: u64, out: u64 }
    /// `repack_*`
    RepackArgs { src: u64, dst: u64, words: u64, rows: u32, kb: u32, type_id: u32, _padding: u32, unfit: u64 }
    /// `digits_split_*`, `digits_many_*`, `digits_wide_*`
    DigitArgs {
        q: u64, f: u64, kv: u64, block_bytes: u64, tiles: u64, groups: u64, counts: u64, tables: u64, part_o: u64, part_l: u64,
        heads: u32, kv_heads: u32, group: u32, window: u32, own: u64, own_bytes: u64, ends: u64,
    }
    /// `tower_attend_*`, `tower_attend_wide_*`, `tower_attend_whole_*`
    RunArgs { d: DigitArgs, runs: u64, out: u64, from: u32, to: u32, dim: u32, _padding: u32 }
    /// `tower_patches`
    PatchArgs { rgb: u64, places: u64, values: u64, x: u64, columns: u32, size: u32, width: u32, _padding: u32 }
    /// `tower_embed`
    PositionArgs {
        part: u64, taps: u64, table: u64, weight: u64, bias: u64, h: u64, segments: u32, n: u32, hidden: u32, eps: f32,
    }
    /// `tower_norm`
    TowerNormArgs {
        part: u64, part_bias: u64, h: u64, weight: u64, bias: u64, act: Act, segments: u32, n: u32, hidden: u32, eps: f32,
    }
    /// `tower_merge`
    MergeArgs { h: u64, patches: u64, weight: u64, bias: u64, act: Act, squares: u32, hidden: u32, eps: f32, _padding: u32 }
    /// `tower_gelu`
    GeluArgs { part: u64, bias: u64, act: Act, segments: u32, n: u32 }
    /// `tower_rows`
    RowsArgs { part: u64, out: u64, act: Act, segments: u32, n: u32, width: u32, _padding: u32 }
    /// `tower_heads`, `tower_values`
    HeadArgs {
        part: u64, bias: u64, rope: u64, slots: u64, q: u64, f: u64, kv: u64, block_bytes: u64, segments: u32, n: u32,
        heads: u32, dim: u32, factor: f32, hadamard: f32,
    }
    /// `kv_transpose`
    TransposeArgs { src: u64, dst: u64, digits: u32, out: u32 }
    /// `digits_combine`, `digits_gate`
    CombineArgs {
        part_o: u64, part_l: u64, tiles: u64, row_tile: u64, qkvg: u64, factors: u64, act: Act, segments: u32, n: u32, width: u32,
        gate_at: u32, group: u32,
    }
}
