//! Products of every type against plain arithmetic, on every instruction set.

use muser_backend::arith::{self, MatrixRole, Segments};
use muser_backend::conformance::Random;
use muser_gguf::{GgmlType, dequantize_row};

use super::layout::{BlockShape, TILE_ROWS};
use super::matmul::{Finish, Input, MatrixView, Panels, Product, RUN_TILES, SUPER_SUMS, Storage};
use super::product::{Scratch, product_run};
use super::rows::QuantTarget;
use super::unpack::Class;
use super::*;
use crate::bounds::Reach;

/// Random blocks of `ty` with tame float scales.
fn random_row(ty: GgmlType, cols: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        (0..ty.row_bytes(cols).expect("whole blocks")).map(|_| random.next_u64() as u8).collect();
    let halves: &[usize] = match ty {
        GgmlType::Q4_1 | GgmlType::Q5_1 | GgmlType::Q4_K | GgmlType::Q5_K => &[0, 2],
        GgmlType::Q2_K => &[80, 82],
        GgmlType::Q3_K => &[108],
        GgmlType::Q6_K => &[208],
        GgmlType::MXFP4 | GgmlType::NVFP4 | GgmlType::F32 | GgmlType::F16 | GgmlType::BF16 => &[],
        _ => &[0],
    };
    let number = |random: &mut Random| (random.below(2001) as f32 - 1000.0) / 1000.0;
    match ty {
        GgmlType::F32 => bytes.chunks_mut(4).for_each(|c| c.copy_from_slice(&number(random).to_le_bytes())),
        GgmlType::F16 => {
            bytes
                .chunks_mut(2)
                .for_each(|c| c.copy_from_slice(&half::f16::from_f32(number(random)).to_le_bytes()));
        }
        GgmlType::BF16 => {
            bytes
                .chunks_mut(2)
                .for_each(|c| c.copy_from_slice(&half::bf16::from_f32(number(random)).to_le_bytes()));
        }
        _ => {
            for block in bytes.chunks_mut(ty.block_bytes()) {
                if ty == GgmlType::NVFP4 {
                    // No negative scales and no NaN; exponents within seven octaves.
                    block[..4].iter_mut().for_each(|scale| *scale = 0x20 + *scale % 0x40);
                }
                for &at in halves {
                    block[at..at + 2].copy_from_slice(&half::f16::from_f32(number(random)).to_le_bytes());
                }
                if ty == GgmlType::MXFP4 {
                    block[0] = 118 + block[0] % 12;
                }
            }
        }
    }
    bytes
}

/// Repacks a matrix by the same function as at load.
fn repack(ty: GgmlType, native: &[u8], rows: usize, cols: usize, view: &MatrixView) -> Vec<u8> {
    let shape = BlockShape::of(ty).expect("a quantised type");
    let row_bytes = native.len() / rows;
    let stride = view.tile_stride(shape);
    let mut out = vec![0; stride * view.tiles()];
    for tile in 0..view.tiles() {
        let from: [*const u8; TILE_ROWS] =
            std::array::from_fn(|r| native[(tile * TILE_ROWS + r).min(rows - 1) * row_bytes..].as_ptr());
        let to = out[tile * stride..].as_mut_ptr();
        let blocks = cols / shape.len;
        // SAFETY: rows have `blocks` blocks, the target a tile row.
        unsafe { shape.transpose(&from, blocks, to.add(shape.words_start(blocks)), to) };
    }
    out
}

/// The product of `n` rows with a matrix, as the executor computes it.
fn multiply(isa: Isa, matrix: MatrixView, x: &[f32], n: usize, finish: Finish) -> Vec<f32> {
    let (kernels, cols, rows) = (Kernels::of(isa), matrix.cols, matrix.rows);
    let (mut q, mut d, mut sums) = (vec![0u8; n * cols], vec![0.0f32; n * cols / 32], vec![0i32; n * cols]);
    assert!(SUPER_SUMS * n * cols.div_ceil(256) <= sums.len());
    let reach = Reach::of(q.len());
    let panels = Panels { q: q.as_mut_ptr(), d: d.as_mut_ptr(), sums: sums.as_mut_ptr(), reach };
    let class = Class::of(matrix.ty);
    let is_super = class.is_some_and(Class::is_super);
    let target = QuantTarget {
        super_blocks: is_super.then_some(panels),
        small_blocks: (class.is_some() && !is_super).then_some(panels),
        k: cols,
        rows: n,
    };
    for t in 0..n {
        // SAFETY: the panels hold `n` rows.
        unsafe { (kernels.quantize)(x[t * cols..].as_ptr(), t, 0, cols, &target) };
    }
    let mut out = vec![0.0f32; n * rows];
    let product = Product {
        matrix,
        input: Input { rows: n, k: cols, super_blocks: panels, small_blocks: panels, float: x.as_ptr() },
        out: out.as_mut_ptr(),
        out_stride: rows,
        finish,
    };
    let mut scratch = Scratch::new(n);
    for tile in (0..matrix.tiles()).step_by(RUN_TILES) {
        let tiles = RUN_TILES.min(matrix.tiles() - tile);
        // SAFETY: all arrays have the sizes that the product states.
        unsafe { product_run(kernels, &product, tile, tiles, &mut scratch) };
    }
    out
}

fn check(ty: GgmlType, rows: usize, cols: usize, n: usize, tolerance: f64) {
    let mut random = Random::new(ty.id() as u64 * 1000 + n as u64);
    let native: Vec<u8> = (0..rows).flat_map(|_| random_row(ty, cols, &mut random)).collect();
    let x: Vec<f32> = (0..n * cols).map(|_| (random.below(4001) as f32 - 2000.0) / 700.0).collect();
    let class = Class::of(ty);
    let whole = Segments::whole(cols);
    let view = MatrixView {
        ty,
        rows,
        cols,
        row_bytes: native.len() / rows,
        scale: 1.0,
        segments: if class.is_some() { Segments::of(MatrixRole::AttnOut, cols) } else { whole },
        storage: Storage::Native(native.as_ptr(), Reach::of(native.len())),
    };
    let repacked = class.map(|_| repack(ty, &native, rows, cols, &view));

    // What the activations are after quantisation, in f64.
    let step = class.map_or(1, |class| if class.is_super() { 256 } else { 32 });
    let mut expected = vec![0.0f64; n * rows];
    let mut size = vec![0.0f64; n * rows];
    for (t, x) in x.chunks(cols).enumerate() {
        let mut seen: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
        if class.is_some() {
            for (x, seen) in x.chunks(step).zip(seen.chunks_mut(step)) {
                let mut codes = vec![0; x.len()];
                let d = arith::quantize_block(x, &mut codes);
                seen.iter_mut().zip(&codes).for_each(|(s, &q)| *s = f64::from(d) * f64::from(q));
            }
        }
        for r in 0..rows {
            let mut w = vec![0.0; cols];
            dequantize_row(ty, &native[r * view.row_bytes..][..view.row_bytes], &mut w).expect("decodes");
            for (w, s) in w.iter().zip(&seen) {
                expected[t * rows + r] += f64::from(*w) * s;
                size[t * rows + r] += (f64::from(*w) * s).abs();
            }
        }
    }

    let mut first: Option<Vec<f32>> = None;
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
        let storages = [
            Some(view.storage),
            repacked.as_ref().map(|r| Storage::Repacked(r.as_ptr(), Reach::of(r.len()))),
        ];
        for storage in storages.into_iter().flatten() {
            let run = |finish: Finish| multiply(isa, MatrixView { storage, ..view }, &x, n, finish);
            let out = run(Finish::Plain);
            // Logits are the same values, scaled and capped, in a last tile of fewer rows too.
            for (scale, cap) in [(0.5, Some(30.0)), (1.0, Some(2.5)), (3.0, None)] {
                let capped = |z: f32| cap.map_or(z, |cap| cap * arith::tanh(z / cap));
                for (i, (&logit, &z)) in run(Finish::Logits { scale, cap }).iter().zip(&out).enumerate() {
                    let expected = capped(z * scale);
                    assert_eq!(logit.to_bits(), expected.to_bits(), "{} value {i}: {logit}", isa.name());
                }
            }
            for (i, (&found, (&expected, &size))) in out.iter().zip(expected.iter().zip(&size)).enumerate() {
                let error = (f64::from(found) - expected).abs() / size.max(1e-9);
                assert!(
                    error < tolerance,
                    "{} {} {n} rows, value {i}: {found} instead of {expected}",
                    ty.name(),
                    isa.name()
                );
            }
            let first = first.get_or_insert_with(|| out.clone());
            assert!(
                first.iter().zip(&out).all(|(a, b)| a.to_bits() == b.to_bits()),
                "{} {}: bits differ",
                ty.name(),
                isa.name()
            );
        }
    }
}

#[test]
fn every_type_multiplies_right() {
    for ty in GgmlType::all().filter(|&ty| Class::of(ty).is_some()) {
        // Small blocks also with inputs that end inside 256.
        let in_runs = Class::of(ty).is_some_and(Class::is_super) && ty != GgmlType::NVFP4;
        let cols = if in_runs { 1280 } else { 1280 + 64 };
        for n in (1..=9).chain([13, 15]) {
            check(ty, 40, cols, n, 1e-6);
        }
    }
}

/// NVFP4 has the bits of its definition, wherever the exponents of a block are: near, as far apart as they can be, and on
/// both sides of what 32 bits hold.
#[test]
fn nvfp4_is_its_definition() {
    let mut random = Random::new(40);
    // Codes from the first to below the second; 0x08 has exponent 1.
    for (from, to) in
        [(0x30, 0x58), (0x00, 0x7F), (0x08, 0x50), (0x08, 0x58), (0x00, 0x10), (0x38, 0x7F), (0x3F, 0x40)]
    {
        for (rows, cols) in [(16, 256), (40, 1280), (21, 320), (33, 64), (16, 768 + 192)] {
            let mut native: Vec<u8> = (0..rows * cols / 64 * 36).map(|_| random.next_u64() as u8).collect();
            for scale in native.chunks_mut(36).flat_map(|block| &mut block[..4]) {
                // One block in a hundred has nothing in it.
                let code = from + *scale % (to - from);
                *scale = if random.below(100) == 0 { 0 } else { code };
            }
            let view = MatrixView {
                ty: GgmlType::NVFP4,
                rows,
                cols,
                row_bytes: cols / 64 * 36,
                scale: 0.37,
                segments: Segments::of(MatrixRole::AttnOut, cols),
                storage: Storage::Native(native.as_ptr(), Reach::of(native.len())),
            };
            let repacked = repack(GgmlType::NVFP4, &native, rows, cols, &view);
            for n in [1, 2, 3, 4, 5, 6, 7, 8, 9, 13] {
                let x: Vec<f32> =
                    (0..n * cols).map(|_| (random.below(4001) as f32 - 2000.0) / 700.0).collect();
                let expected: Vec<u32> = x
                    .chunks(cols)
                    .flat_map(|x| native.chunks(view.row_bytes).map(move |row| (row, x)))
                    .map(|(row, x)| arith::nvfp4::product(row, x, view.segments, view.scale).to_bits())
                    .collect();
                for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
                    for storage in
                        [view.storage, Storage::Repacked(repacked.as_ptr(), Reach::of(repacked.len()))]
                    {
                        let found = multiply(isa, MatrixView { storage, ..view }, &x, n, Finish::Plain);
                        let found: Vec<u32> = found.iter().map(|v| v.to_bits()).collect();
                        let name = isa.name();
                        assert_eq!(
                            found, expected,
                            "{name}: {rows} x {cols}, {n} rows, scales from {from:#x} to {to:#x}"
                        );
                    }
                }
            }
        }
    }
}

/// Blocks of which every value is as large as it can be: no sum overflows, on either path.
#[test]
fn nvfp4_sums_hold_the_largest_numbers() {
    // Exponents 1 and 9, the most that one sum of 32 bits takes; 1 and 10; all at the top.
    for scales in [[0x0F, 0x4F, 0x4F, 0x4F], [0x0F, 0x57, 0x57, 0x57], [0x7E; 4], [0x01, 0x7E, 0x7E, 0x7E]] {
        let mut block = [0x77u8; 36];
        block[..4].copy_from_slice(&scales);
        let native = block.repeat(4 * 16);
        let view = MatrixView {
            ty: GgmlType::NVFP4,
            rows: 16,
            cols: 256,
            row_bytes: 4 * 36,
            scale: 1.0,
            segments: Segments::whole(256),
            storage: Storage::Native(native.as_ptr(), Reach::of(native.len())),
        };
        for (x, n) in [(3.0, 1), (-3.0, 8), (3.0, 9)] {
            let x = vec![x; n * 256];
            let expected = arith::nvfp4::product(&native[..4 * 36], &x[..256], view.segments, 1.0);
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
                let found = multiply(isa, view, &x, n, Finish::Plain);
                assert!(found.iter().all(|v| v.to_bits() == expected.to_bits()), "{} {scales:?}", isa.name());
            }
        }
    }
}

#[test]
fn float_types_multiply_right() {
    for ty in [GgmlType::F32, GgmlType::F16, GgmlType::BF16] {
        check(ty, 21, 1280 + 12, 3, 1e-6);
    }
}

/// The vector functions are the scalar definitions that other backends are checked against.
#[test]
fn functions_are_those_of_the_definition() {
    let mut random = Random::new(3);
    let mut values: Vec<f32> =
        (0..4096).map(|_| (random.below(200_001) as f32 - 100_000.0) / 1000.0).collect();
    values.extend([
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        -87.33654,
        -87.336_55,
        1e-30,
        88.4,
        -1e-8,
        3e38,
    ]);
    values.resize(values.len().next_multiple_of(16), 0.5);
    let up: Vec<f32> = values.iter().rev().copied().collect();
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
        let kernels = Kernels::of(isa);
        let (mut gated, mut product) = (up.clone(), up.clone());
        // SAFETY: all have the same length, a multiple of 16.
        unsafe {
            (kernels.gate)(gated.as_mut_ptr(), values.as_ptr(), values.len());
            (kernels.silu_mul)(values.as_ptr(), product.as_mut_ptr(), values.len());
        }
        for (i, (&x, &u)) in values.iter().zip(&up).enumerate() {
            let same = |found: f32, expected: f32| {
                found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan()
            };
            assert!(same(gated[i], u * arith::sigmoid(x)), "{}: sigmoid({x})", isa.name());
            assert!(same(product[i], arith::silu_times(x, u)), "{}: silu({x}) * {u}", isa.name());
        }
    }
}

/// The step between two products, on rows with a length that is no multiple of anything.
#[test]
fn norms_are_those_of_the_definition() {
    let mut random = Random::new(5);
    for len in [1usize, 7, 100, 128, 256, 700, 6656, 9000] {
        let mut row = || (0..len).map(|_| (random.below(2001) as f32 - 1000.0) / 250.0).collect::<Vec<f32>>();
        let (h, o, w) = (row(), row(), row());
        let sums = arith::ResidualSums::of(&h, &o, &w);
        let c = sums.post_factor(1e-8);
        let expected: Vec<f32> = (0..len).map(|i| c.mul_add(o[i] * w[i], h[i])).collect();
        let factor = arith::inverse_rms(arith::row_dot(&h, &h), len, 1e-5);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            let kernels = Kernels::of(isa);
            let (mut sum, mut normed) = (h.clone(), h.clone());
            // SAFETY: all have the same length.
            let r = unsafe {
                (kernels.rms_norm)(h.as_ptr(), w.as_ptr(), 1e-5, normed.as_mut_ptr(), len);
                (kernels.add_post_norm)(sum.as_mut_ptr(), o.as_ptr(), w.as_ptr(), (1e-8, 1e-5), len)
            };
            assert_eq!(r.to_bits(), sums.next_factor(c, 1e-5).to_bits(), "{} {len}", isa.name());
            for i in 0..len {
                assert_eq!(sum[i].to_bits(), expected[i].to_bits(), "{} {len} {i}", isa.name());
                assert_eq!(normed[i].to_bits(), (h[i] * factor * w[i]).to_bits(), "{} {len} {i}", isa.name());
            }
        }
    }
}

/// What would read or write beyond what there is ends with a word instead.
#[test]
fn bounds_are_looked_at() {
    let panics = |run: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err();
    let cols = 256;
    for ty in [GgmlType::Q8_0, GgmlType::Q4_K, GgmlType::F16] {
        let mut random = Random::new(5);
        let native: Vec<u8> = (0..32).flat_map(|_| random_row(ty, cols, &mut random)).collect();
        let view = |bytes: usize| MatrixView {
            ty,
            rows: 32,
            cols,
            row_bytes: native.len() / 32,
            scale: 1.0,
            segments: Segments::whole(cols),
            storage: Storage::Native(native.as_ptr(), Reach::of(bytes)),
        };
        for n in [1, 9] {
            let x = vec![1.0; n * cols];
            assert!(!panics(&|| drop(multiply(Isa::Scalar, view(native.len()), &x, n, Finish::Plain))));
            assert!(panics(&|| drop(multiply(Isa::Scalar, view(native.len() - 1), &x, n, Finish::Plain))));
        }
    }
    let mut codes = [0u8; 512];
    let (mut d, mut sums) = ([0.0f32; 16], [0i32; 64]);
    let (q, d, sums) = (codes.as_mut_ptr(), d.as_mut_ptr(), sums.as_mut_ptr());
    let quantize = |rows: usize, row: usize| {
        let panels = Panels { q, d, sums, reach: Reach::of(512) };
        let target = QuantTarget { super_blocks: None, small_blocks: Some(panels), k: cols, rows };
        // SAFETY: there is room for two rows; the check is before the first write.
        unsafe { (Kernels::of(Isa::Scalar).quantize)([1.0; 256].as_ptr(), row, 0, cols, &target) };
    };
    assert!(!panics(&|| quantize(2, 1)));
    assert!(panics(&|| quantize(3, 2)));
}
