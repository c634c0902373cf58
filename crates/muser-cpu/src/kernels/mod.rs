//! The kernels, written once over [`crate::simd::Simd`] and compiled once per instruction set.
//!
//! [`Kernels`] is the table of compiled functions; [`Kernels::of`] is the only place that tells instruction sets apart.
#![allow(
    unsafe_code,
    unsafe_op_in_unsafe_fn,
    reason = "a kernel is unsafe as a whole: it follows raw pointers whose shapes its arguments state"
)]
#![allow(
    clippy::needless_range_loop,
    clippy::too_many_arguments,
    clippy::cast_ptr_alignment,
    reason = "kernels index registers and lanes by formula, and all loads are unaligned ones"
)]

pub(crate) mod attention;
pub(crate) mod exact;
mod four;
pub(crate) mod fused;
pub(crate) mod kv;
pub(crate) mod layout;
mod math;
pub(crate) mod matmul;
pub(crate) mod probe;
pub(crate) mod product;
pub(crate) mod query_tile;
pub(crate) mod rows;
#[cfg(test)]
mod tests;
mod tile;
pub(crate) mod tower;
pub(crate) mod unpack;
mod words;

use std::ops::Range;

use muser_gguf::GgmlType;
use muser_kv::BlockId;

use self::tile::PanelBlock;
use crate::isa::Isa;
use kv::KvView;
use layout::BlockShape;
use matmul::{PANEL, Product, SCRATCH};
use rows::QuantTarget;
use words::Tile;

/// Tile, offset of its codes, inputs, activations, accumulators.
pub(crate) type PanelKernel = unsafe fn(&Tile, i32, usize, PanelBlock, *mut f32);
/// Type, words, extra scales, inputs, target.
pub(crate) type UnpackKernel = unsafe fn(GgmlType, *const u8, *const u8, usize, &mut Tile);

/// Product, shape of the matrix' blocks, row tile, first row, first block of its panel, working memory.
pub(crate) type FusedKernel = unsafe fn(&Product, BlockShape, usize, usize, PanelBlock, &mut [u8; SCRATCH]);

/// Compiled kernels of one instruction set; each is described at the generic function of its name.
#[derive(Clone, Copy)]
pub(crate) struct Kernels {
    /// By variant of the type's class, then by the number of rows less one.
    pub(crate) panels: [[Option<PanelKernel>; PANEL]; 9],
    /// By the number of rows less one.
    pub(crate) fused: [Option<FusedKernel>; PANEL],
    pub(crate) unpack_super: UnpackKernel,
    pub(crate) unpack_small: UnpackKernel,
    pub(crate) float_run: unsafe fn(&Product, usize, usize),
    pub(crate) finish: unsafe fn(&Product, usize, usize, *mut f32),
    pub(crate) rms_norm: unsafe fn(*const f32, *const f32, f32, *mut f32, usize),
    pub(crate) scale_row: unsafe fn(*const f32, f32, *const f32, *mut f32, usize),
    pub(crate) add_post_norm: unsafe fn(*mut f32, *const f32, *const f32, (f32, f32), usize) -> f32,
    pub(crate) quantize: unsafe fn(*const f32, usize, usize, usize, &QuantTarget),
    pub(crate) head_norm_rope: unsafe fn(*mut f32, *const f32, f32, usize, *const f32),
    pub(crate) head_norm_rope_halves: unsafe fn(*mut f32, *const f32, f32, usize, *const f32),
    pub(crate) gate: unsafe fn(*mut f32, *const f32, usize),
    pub(crate) silu_mul: unsafe fn(*const f32, *mut f32, usize),
    pub(crate) attend: unsafe fn(&kv::Tile<'_>, *mut f32, usize, &mut kv::Scratch),
    pub(crate) attend_blocks: unsafe fn(&kv::Tile<'_>, Range<usize>, *mut f32, &mut kv::Scratch),
    pub(crate) combine_blocks: unsafe fn(*const f32, usize, usize, *mut f32, usize, &mut kv::Scratch),
    pub(crate) store_kv: unsafe fn(&KvView, BlockId, usize, *mut f32, *const f32),
    pub(crate) read_pass: unsafe fn(*const u8, usize) -> u64,
    pub(crate) layer_norm: unsafe fn(*const f32, *const f32, *const f32, f32, *mut f32, usize),
    pub(crate) bias_rope: unsafe fn(*mut f32, *const f32, usize, *const f32),
    pub(crate) add_bias: unsafe fn(*mut f32, *const f32, usize),
    pub(crate) add_product: unsafe fn(*mut f32, *const f32, *const f32, usize),
    pub(crate) gelu: unsafe fn(*mut f32, *const f32, usize),
    pub(crate) add_position: unsafe fn(*mut f32, &[(usize, f32); 4], *const f32, usize),
}

/// Kernels by the number of rows less one. With 32 registers there is one of every width (which
/// [`tile::stride`] relies on), with 16 there are those of 1 and 4.
macro_rules! ladder {
    (8, $f:ident, $($c:tt),*) => {
        [
            Some($f::<1, $($c),*>),
            Some($f::<2, $($c),*>),
            Some($f::<3, $($c),*>),
            Some($f::<4, $($c),*>),
            Some($f::<5, $($c),*>),
            Some($f::<6, $($c),*>),
            Some($f::<7, $($c),*>),
            Some($f::<8, $($c),*>),
        ]
    };
    (4, $f:ident, $($c:tt),*) => {
        [Some($f::<1, $($c),*>), None, None, Some($f::<4, $($c),*>), None, None, None, None]
    };
    (1, $f:ident, $($c:tt),*) => { [Some($f::<1, $($c),*>), None, None, None, None, None, None, None] };
}

macro_rules! compile {
    ($set:ident, $simd:ty, $rows:tt, $(#[$attr:meta])*) => {
        mod $set {
            use super::*;

            $(#[$attr])*
            unsafe fn super_panel<
                const T: usize,
                const GROUP: usize,
                const MINS: bool,
                const WIDE: bool,
                const SIX: bool,
            >(
                tile: &Tile,
                offset: i32,
                _inputs: usize,
                x: PanelBlock,
                acc: *mut f32,
            ) {
                tile::super_block::<$simd, T, GROUP, MINS, WIDE, SIX>(tile, offset, x, acc);
            }
            $(#[$attr])*
            unsafe fn small_panel<const T: usize, const MINS: bool, const WIDE: bool>(
                tile: &Tile,
                offset: i32,
                inputs: usize,
                x: PanelBlock,
                acc: *mut f32,
            ) {
                tile::small_blocks::<$simd, T, MINS, WIDE>(tile, offset, inputs, x, acc);
            }
            $(#[$attr])*
            unsafe fn four_panel<const T: usize>(
                tile: &Tile,
                _offset: i32,
                inputs: usize,
                x: PanelBlock,
                acc: *mut f32,
            ) {
                four::panel::<$simd, T>(tile, inputs, x, acc);
            }
            $(#[$attr])*
            unsafe fn fused_tile<const T: usize>(
                p: &Product,
                shape: BlockShape,
                tile: usize,
                row: usize,
                x: PanelBlock,
                scratch: &mut [u8; SCRATCH],
            ) {
                fused::tile::<$simd, T>(p, shape, tile, row, x, scratch);
            }
            $(#[$attr])*
            unsafe fn unpack_super(
                ty: GgmlType,
                words: *const u8,
                extra: *const u8,
                inputs: usize,
                tile: &mut Tile,
            ) {
                unpack::unpack_super::<$simd>(ty, words, extra, inputs, tile);
            }
            $(#[$attr])*
            unsafe fn unpack_small(
                ty: GgmlType,
                words: *const u8,
                extra: *const u8,
                inputs: usize,
                tile: &mut Tile,
            ) {
                unpack::unpack_small::<$simd>(ty, words, extra, inputs, tile);
            }
            $(#[$attr])*
            unsafe fn float_run(p: &Product, first: usize, count: usize) {
                matmul::float_run::<$simd>(p, first, count);
            }
            $(#[$attr])*
            unsafe fn finish(p: &Product, tile: usize, row: usize, lanes: *mut f32) {
                matmul::finish::<$simd>(p, tile, row, lanes);
            }
            $(#[$attr])*
            unsafe fn rms_norm(x: *const f32, weight: *const f32, eps: f32, out: *mut f32, len: usize) {
                rows::rms_norm::<$simd>(x, weight, eps, out, len);
            }
            $(#[$attr])*
            unsafe fn scale_row(x: *const f32, r: f32, weight: *const f32, out: *mut f32, len: usize) {
                rows::scale_row::<$simd>(x, r, weight, out, len);
            }
            $(#[$attr])*
            unsafe fn add_post_norm(
                h: *mut f32,
                o: *const f32,
                weight: *const f32,
                eps: (f32, f32),
                len: usize,
            ) -> f32 {
                rows::add_post_norm::<$simd>(h, o, weight, eps, len)
            }
            $(#[$attr])*
            unsafe fn quantize(x: *const f32, row: usize, from: usize, to: usize, target: &QuantTarget) {
                rows::quantize::<$simd>(x, row, from, to, target);
            }
            $(#[$attr])*
            unsafe fn head_norm_rope(x: *mut f32, weight: *const f32, eps: f32, dim: usize, rope: *const f32) {
                rows::head_norm_rope::<$simd, false>(x, weight, eps, dim, rope);
            }
            $(#[$attr])*
            unsafe fn head_norm_rope_halves(
                x: *mut f32,
                weight: *const f32,
                eps: f32,
                dim: usize,
                rope: *const f32,
            ) {
                rows::head_norm_rope::<$simd, true>(x, weight, eps, dim, rope);
            }
            $(#[$attr])*
            unsafe fn gate(o: *mut f32, g: *const f32, len: usize) {
                rows::gate::<$simd>(o, g, len);
            }
            $(#[$attr])*
            unsafe fn silu_mul(gate: *const f32, up: *mut f32, len: usize) {
                rows::silu_mul::<$simd>(gate, up, len);
            }
            $(#[$attr])*
            unsafe fn float_block(
                tile: &attention::Tile<'_>,
                block: usize,
                end: usize,
                scratch: &mut attention::Scratch,
            ) {
                attention::one_block::<$simd>(tile, block, end, scratch);
            }
            $(#[$attr])*
            unsafe fn digit_block(
                tile: &exact::Tile<'_>,
                block: usize,
                end: usize,
                scratch: &mut exact::Scratch,
            ) {
                exact::one_block::<$simd>(tile, block, end, scratch);
            }
            const BLOCKS: kv::BlockKernels = kv::BlockKernels { float: float_block, digits: digit_block };
            $(#[$attr])*
            unsafe fn attend(
                tile: &kv::Tile<'_>,
                out: *mut f32,
                stride: usize,
                scratch: &mut kv::Scratch,
            ) {
                kv::attend::<$simd>(tile, out, stride, scratch, BLOCKS);
            }
            $(#[$attr])*
            unsafe fn attend_blocks(
                tile: &kv::Tile<'_>,
                blocks: Range<usize>,
                partial: *mut f32,
                scratch: &mut kv::Scratch,
            ) {
                kv::attend_blocks::<$simd>(tile, blocks, partial, scratch, BLOCKS);
            }
            $(#[$attr])*
            unsafe fn combine_blocks(
                partial: *const f32,
                count: usize,
                stride: usize,
                out: *mut f32,
                dim: usize,
                scratch: &mut kv::Scratch,
            ) {
                kv::combine_blocks::<$simd>(partial, count, stride, out, dim, scratch);
            }
            $(#[$attr])*
            unsafe fn store_kv(kv: &KvView, id: BlockId, slot: usize, k: *mut f32, v: *const f32) {
                kv::store_kv::<$simd>(kv, id, slot, k, v);
            }
            $(#[$attr])*
            unsafe fn read_pass(bytes: *const u8, len: usize) -> u64 {
                probe::read_pass::<$simd>(bytes, len)
            }
            $(#[$attr])*
            unsafe fn layer_norm(
                x: *const f32,
                weight: *const f32,
                bias: *const f32,
                eps: f32,
                out: *mut f32,
                len: usize,
            ) {
                tower::layer_norm::<$simd>(x, weight, bias, eps, out, len);
            }
            $(#[$attr])*
            unsafe fn bias_rope(x: *mut f32, bias: *const f32, dim: usize, rope: *const f32) {
                tower::bias_rope::<$simd>(x, bias, dim, rope);
            }
            $(#[$attr])*
            unsafe fn add_bias(x: *mut f32, bias: *const f32, len: usize) {
                tower::add_bias::<$simd>(x, bias, len);
            }
            $(#[$attr])*
            unsafe fn add_product(h: *mut f32, product: *const f32, bias: *const f32, len: usize) {
                tower::add_product::<$simd>(h, product, bias, len);
            }
            $(#[$attr])*
            unsafe fn gelu(x: *mut f32, bias: *const f32, len: usize) {
                tower::gelu::<$simd>(x, bias, len);
            }
            $(#[$attr])*
            unsafe fn add_position(x: *mut f32, taps: &[(usize, f32); 4], table: *const f32, hidden: usize) {
                tower::add_position::<$simd>(x, taps, table, hidden);
            }

            pub(super) static TABLE: Kernels = Kernels {
                panels: [
                    ladder!($rows, super_panel, 16, true, false, false),
                    ladder!($rows, super_panel, 32, true, false, false),
                    ladder!($rows, super_panel, 16, false, false, false),
                    ladder!($rows, super_panel, 32, false, true, false),
                    ladder!($rows, four_panel,),
                    ladder!($rows, small_panel, false, false),
                    ladder!($rows, small_panel, false, true),
                    ladder!($rows, small_panel, true, false),
                    ladder!($rows, super_panel, 16, false, false, true),
                ],
                fused: ladder!($rows, fused_tile,),
                unpack_super,
                unpack_small,
                float_run,
                finish,
                rms_norm,
                scale_row,
                add_post_norm,
                quantize,
                head_norm_rope,
                head_norm_rope_halves,
                gate,
                silu_mul,
                attend,
                attend_blocks,
                combine_blocks,
                store_kv,
                read_pass,
                layer_norm,
                bias_rope,
                add_bias,
                add_product,
                gelu,
                add_position,
            };
        }
    };
}

compile!(scalar, crate::simd::scalar::Scalar, 1,);
#[cfg(target_arch = "x86_64")]
compile!(avx2, crate::simd::avx2::Avx2, 4, #[target_feature(enable = "avx2,fma,f16c,bmi2")]);
#[cfg(target_arch = "x86_64")]
compile!(avx_vnni, crate::simd::avx2::AvxVnni, 4, #[target_feature(enable = "avx2,fma,f16c,bmi2,avxvnni")]);
#[cfg(target_arch = "x86_64")]
compile!(
    avx512,
    crate::simd::avx512::Avx512,
    8,
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c,bmi2")]
);
#[cfg(target_arch = "aarch64")]
compile!(neon, crate::simd::neon::Neon, 4, #[target_feature(enable = "neon,dotprod")]);

impl Kernels {
    /// The table of an instruction set that [`Isa::is_supported`].
    pub(crate) fn of(isa: Isa) -> &'static Kernels {
        match isa {
            Isa::Scalar => &scalar::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &avx2::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => &avx_vnni::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &avx512::TABLE,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => &neon::TABLE,
            #[allow(unreachable_patterns, reason = "the sets of other architectures")]
            _ => &scalar::TABLE,
        }
    }
}
