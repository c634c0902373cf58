//! How fast the kernels stream weights, type by type, beside a plain read loop.
//!
//! `kernel_bench [--threads N] [--inputs K] [--rows 1,8] [--types Q4_K,Q6_K] [--pages huge|small] [--reps N]
//! [--mib 256]`. Prints GB/s of weights, best and median of the passes.
#![allow(clippy::print_stdout, reason = "a command")]

use muser_cpu::{BandwidthProbe, KernelProbe};
use muser_gguf::GgmlType;

fn main() {
    let (mut threads, mut inputs, mut reps, mut huge, mut mib) = (None, 2048, 7, true, 256.0);
    let (mut rows, mut types) = ("1".to_string(), "Q4_K,Q5_K,Q6_K".to_string());
    let mut args = muser_bench::arguments();
    while let Some(arg) = args.next() {
        let value = args.next().expect("a value");
        match arg.as_str() {
            "--threads" => threads = Some(value.parse().expect("a number")),
            "--inputs" => inputs = value.parse().expect("a number"),
            "--reps" => reps = value.parse().expect("a number"),
            "--mib" => mib = value.parse().expect("a number"),
            "--rows" => rows = value,
            "--types" => types = value,
            "--pages" => huge = value == "huge",
            other => panic!("unknown argument {other}"),
        }
    }
    let bytes = (mib * f64::from(1 << 20)) as usize;
    let mut read = BandwidthProbe::new(bytes, threads, huge).expect("probe");
    for name in types.split(',') {
        let ty = (0..64).filter_map(GgmlType::from_id).find(|ty| ty.name() == name).expect("a type");
        let mut probe = KernelProbe::new(ty, inputs, bytes, threads, huge).expect("probe");
        for rows in rows.split(',').map(|n| n.parse().expect("a number")) {
            let before = read.measure(3).expect("measurement");
            let found = probe.measure(rows, reps).expect("measurement");
            println!(
                "{name} x {rows}: {:.2} GB/s (median {:.2}), plain read {:.2}",
                found.best() / 1e9,
                found.median() / 1e9,
                before.best() / 1e9
            );
        }
    }
}
