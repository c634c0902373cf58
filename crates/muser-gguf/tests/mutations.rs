//! Whatever happens to the bytes of a valid file: opening it ends, without a panic, without much memory.
//!
//! This test program counts what the allocator hands out, so it has one test only. `MUSER_TEST_LONG=1` runs a hundred
//! times as many cases.

use std::time::{Duration, Instant};

use muser_gguf::{GgmlType, GgufFile, GgufWriter, Value, dequantize_row};
use muser_testkit::{CountingAllocator, bytes_allocated};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Bytes that opening a file of a few thousand bytes may allocate in total.
const ALLOWED: u64 = 2 << 20;

#[derive(Clone, Debug)]
enum Mutation {
    Truncate(usize),
    Flip(usize, u8),
    /// A number that breaks naive arithmetic, at a place that may hold a count, a length or an offset.
    Number(usize, u64),
    /// Bytes from one place over those at another.
    Copy(usize, usize, usize),
    Insert(usize, u64),
    Remove(usize, usize),
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let number = prop_oneof![
        Just(0),
        Just(1),
        Just(u64::from(u32::MAX)),
        Just(u64::MAX),
        Just(i64::MAX as u64),
        Just(1 << 40),
        (0..64_u32).prop_map(|bit| (1 << bit) + 1),
        (0..300_u64),
        any::<u64>(),
    ];
    prop_oneof![
        any::<usize>().prop_map(Mutation::Truncate),
        (any::<usize>(), any::<u8>()).prop_map(|(at, byte)| Mutation::Flip(at, byte)),
        (any::<usize>(), number.clone()).prop_map(|(at, number)| Mutation::Number(at, number)),
        (any::<usize>(), any::<usize>(), 1..64_usize)
            .prop_map(|(from, to, len)| Mutation::Copy(from, to, len)),
        (any::<usize>(), number).prop_map(|(at, number)| Mutation::Insert(at, number)),
        (any::<usize>(), 1..64_usize).prop_map(|(at, len)| Mutation::Remove(at, len)),
    ]
}

fn apply(bytes: &mut Vec<u8>, mutation: &Mutation) {
    if bytes.is_empty() {
        return;
    }
    let len = bytes.len();
    match *mutation {
        Mutation::Truncate(at) => bytes.truncate(at % len),
        Mutation::Flip(at, byte) => bytes[at % len] ^= byte,
        Mutation::Number(at, number) => {
            let at = at % len;
            let end = (at + 8).min(len);
            bytes[at..end].copy_from_slice(&number.to_le_bytes()[..end - at]);
        }
        Mutation::Copy(from, to, count) => {
            let (from, to) = (from % len, to % len);
            let count = count.min(len - from).min(len - to);
            bytes.copy_within(from..from + count, to);
        }
        Mutation::Insert(at, number) => {
            let at = at % len;
            bytes.splice(at..at, number.to_le_bytes());
        }
        Mutation::Remove(at, count) => {
            let at = at % len;
            bytes.drain(at..(at + count).min(len));
        }
    }
}

/// A file with every kind of value and several tensors.
fn valid() -> Vec<u8> {
    let mut writer = GgufWriter::new();
    let scalars = [
        Value::U8(1),
        Value::I8(-1),
        Value::U16(2),
        Value::I16(-2),
        Value::U32(3),
        Value::I32(-3),
        Value::F32(0.5),
        Value::Bool(true),
        Value::String("text"),
        Value::U64(4),
        Value::I64(-4),
        Value::F64(0.25),
    ];
    writer.put("general.alignment", Value::U32(64)).expect("free");
    for (index, value) in scalars.into_iter().enumerate() {
        writer.put(&format!("scalar.{index}"), value).expect("free");
    }
    writer.put_strings("strings", ["a", "", "längeres", "d"]).expect("free");
    writer.put_bools("bools", [true, false, true]).expect("free");
    writer.put_i32s("integers", [1, 2, -3]).expect("free");
    writer.put_f32s("floats", [1.0, f32::NAN]).expect("free");
    for (index, (dims, ty)) in [
        (&[32_u64, 2][..], GgmlType::Q8_0),
        (&[256], GgmlType::Q4_K),
        (&[5], GgmlType::F32),
        (&[2, 3, 4, 1], GgmlType::F16),
        (&[64, 2], GgmlType::NVFP4),
        (&[256], GgmlType::IQ1_S),
    ]
    .into_iter()
    .enumerate()
    {
        writer.tensor(&format!("blk.{index}.weight"), dims, ty).expect("fits");
    }
    let header = writer.finish();
    let mut bytes = header.bytes().to_vec();
    bytes.resize(header.file_len() as usize, 0x3C);
    bytes
}

/// Touches everything that an open file offers.
fn use_it(file: &GgufFile) {
    let mut sum = 0_usize;
    for (key, value) in file.metadata() {
        sum += key.len() + value.describe().len();
        if let Value::Array(array) = value {
            sum += array.byte_strings().map_or(0, |strings| strings.map(<[u8]>::len).sum());
            sum += array.scalars().map_or(0, |scalars| scalars.filter_map(Value::as_integer).count());
        }
        let _ =
            (file.str(key), file.u32(key), file.f32(key), file.bool(key), file.strings(key), file.bools(key));
        let _ = (file.integers::<u8>(key), file.floats(key), file.array(key));
    }
    for tensor in file.tensors() {
        let data = file.tensor_data(tensor);
        sum += data.iter().map(|byte| usize::from(*byte)).sum::<usize>();
        let block = tensor.ty.block_bytes();
        let mut values = vec![0.0; tensor.ty.block_len()];
        let _ = dequantize_row(tensor.ty, &data[..block], &mut values);
        assert!(file.tensor(&tensor.name).is_some());
    }
    std::hint::black_box(sum);
}

#[test]
fn mutated_files_never_panic_hang_or_take_memory() {
    let valid = valid();
    use_it(&GgufFile::from_bytes(&valid).expect("the file is valid"));
    for len in 0..valid.len() {
        // The last tensor ends before the padding of the file's end.
        if let Ok(file) = GgufFile::from_bytes(&valid[..len]) {
            assert!(len >= valid.len() - 64, "a cut at {len} of {} is noticed", valid.len());
            use_it(&file);
        }
    }

    let cases = if muser_testkit::is_long() { 2_000_000 } else { 20_000 };
    let mut runner = TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    let (mut opened, mut refused) = (0, 0);
    let counts = std::cell::RefCell::new((&mut opened, &mut refused));
    let result = runner.run(&prop::collection::vec(mutation(), 1..6), |mutations| {
        let mut bytes = valid.clone();
        for mutation in &mutations {
            apply(&mut bytes, mutation);
        }
        let (before, start) = (bytes_allocated(), Instant::now());
        let result = GgufFile::from_bytes(&bytes);
        let allocated = bytes_allocated() - before;
        prop_assert!(allocated < ALLOWED, "{} bytes allocated for a file of {}", allocated, bytes.len());
        prop_assert!(start.elapsed() < Duration::from_secs(2), "opening took {:?}", start.elapsed());
        let mut counts = counts.borrow_mut();
        match result {
            Ok(file) => {
                use_it(&file);
                *counts.0 += 1;
            }
            Err(error) => {
                let text = error.to_string();
                prop_assert!(text.len() < 1000 && !text.chars().any(char::is_control), "{text}");
                *counts.1 += 1;
            }
        }
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
    assert!(opened > cases / 50 && refused > cases / 50, "{opened} opened, {refused} refused");
}
