//! Every kernel compiles for every architecture, without spilling registers or asking for more shared memory than a CTA
//! may have there, on a machine without a card.
//!
//! Needs NVRTC only (a CUDA toolkit, or the Python package `nvidia-cuda-nvrtc` with `MUSER_NVRTC_DIR` set to its folder);
//! where there is none it is in the list of tests that did not run, which `cargo xtask test` prints. All architectures each time.

use std::sync::atomic::{AtomicUsize, Ordering};

use muser_backend::arith::attention::Digits;
use muser_cuda::kernels::{COMBINE_RING_BYTES, FILES, KernelFile, TowerAttention, Tuning};
use muser_cuda::nvrtc;

/// Kernels that spill a little, by architecture: where 512 threads leave 128 registers to two accumulators of 32 rows x
/// 32 tokens, where a row of up to 32 warps leaves 64, and where a warp that fetches for others has few. What spills are addresses,
/// outside the inner loop.
const KNOWN_SPILLS: [(&str, &[u32]); 32] = [
    ("many_f32", &[80]),
    ("many_f16", &[80]),
    ("many_bf16", &[80]),
    ("tower_attend_96", &[86, 89, 90]),
    ("tower_attend_128", &[80, 86, 89, 90]),
    ("few_q4k_16", &[80]),
    ("few_q5k_16", &[80, 90]),
    ("many_q4k", &[90, 100]),
    ("many_q5k", &[90, 100]),
    ("many_q6k", &[90, 100, 120]),
    ("many_nv4", &[90, 120]),
    ("many_q80", &[100]),
    ("few_nv4_16", &[80, 120]),
    ("few_q6k_16", &[120]),
    ("norm_rows", &[80, 86, 89, 90, 100, 120]),
    ("norm_cut", &[80, 86, 89, 90, 100, 120]),
    ("embed_rows", &[80, 90]),
    ("any_super_1", &[80, 86, 89, 90, 100, 120]),
    ("any_super_8", &[80, 86, 89, 90, 100, 120]),
    ("digits_many_1", &[80, 86, 89, 90, 100, 120]),
    ("digits_many_2", &[80, 86, 89, 90, 100, 120]),
    ("fused_q4k_32", &[90]),
    ("fused_q4k_64", &[90]),
    ("fused_q4k_128", &[90]),
    ("fused_q5k_32", &[90]),
    ("fused_q5k_64", &[90]),
    ("fused_q5k_128", &[90]),
    ("fused_nv4_32", &[90]),
    ("fused_nv4_64", &[90]),
    ("fused_q6k_32", &[90]),
    ("fused_q6k_64", &[90]),
    ("fused_q6k_128", &[90]),
];
const KNOWN_SPILL_BYTES: u32 = 320;

#[test]
fn all_kernels_compile_for_all_architectures() {
    if let Err(error) = nvrtc::find() {
        assert!(std::env::var_os(nvrtc::NVRTC_DIR_VAR).is_none(), "a compiler was named: {error}");
        muser_testkit::skip(muser_testkit::Need::Nvrtc, format!("kernels are not compiled: {error}"));
        return;
    }
    let jobs: Vec<_> = [80, 86, 89, 90, 100, 120]
        .iter()
        .flat_map(|a| FILES.iter().filter(|f| f.supports(*a)).map(move |f| (f, *a)))
        .collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, std::num::NonZero::get) {
            scope.spawn(|| {
                while let Some((file, arch)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    check(file, *arch);
                }
            });
        }
    });
}

fn check(file: &KernelFile, arch: u32) {
    let compiled = nvrtc::compile(file, arch).expect("the kernels compile");
    assert!(compiled.image.starts_with(b"\x7fELF"), "{} for sm_{arch}: not machine code", file.name);
    let mut found: Vec<&str> = compiled.usage.iter().map(|u| u.kernel.as_str()).collect();
    let mut expected = file.kernels.to_vec();
    found.sort_unstable();
    expected.sort_unstable();
    assert_eq!(found, expected, "kernels of {}", file.name);
    for usage in &compiled.usage {
        let known =
            KNOWN_SPILLS.iter().any(|(kernel, archs)| usage.kernel == *kernel && archs.contains(&arch));
        let allowed = if known { KNOWN_SPILL_BYTES } else { 0 };
        assert!(
            usage.spill_bytes <= allowed,
            "{} for sm_{arch} spills {} bytes with {} registers",
            usage.kernel,
            usage.spill_bytes,
            usage.registers
        );
        assert!(usage.registers > 0, "{}: no register count in the assembler's log", usage.kernel);
        let (tuning, asked) = (Tuning::of(arch), asked_for(&usage.kernel, arch));
        assert!(
            usage.shared_bytes + asked <= tuning.shared_bytes,
            "{} for sm_{arch} has {} bytes of shared memory and asks for {asked}, a CTA may have {}",
            usage.kernel,
            usage.shared_bytes,
            tuning.shared_bytes
        );
    }
}

/// Shared memory that a launch of an attention kernel asks for.
fn asked_for(kernel: &str, arch: u32) -> u32 {
    let tuning = Tuning::of(arch);
    match kernel {
        "digits_split_1" => tuning.split_shared_bytes(Digits::One),
        "digits_split_2" => tuning.split_shared_bytes(Digits::Two),
        "digits_many_1" | "digits_wide_1" => tuning.many_shared_bytes(Digits::One),
        "digits_many_2" | "digits_wide_2" => tuning.many_shared_bytes(Digits::Two),
        "digits_combine" => COMBINE_RING_BYTES,
        _ => {
            let of_tower = [64, 96, 128].into_iter().flat_map(|dim| TowerAttention::of(arch, dim));
            of_tower.into_iter().find(|attention| attention.name == kernel).map_or(0, |a| a.shared_bytes())
        }
    }
}
