//! What is written is read back: values of all types, tensors, split sets, versions 2 and 3.

mod common;

use std::path::{Path, PathBuf};

use common::Raw;
use muser_gguf::{GgmlType, GgufError, GgufFile, GgufWriter, Value};

fn message(result: Result<GgufFile, GgufError>) -> String {
    result.expect_err("refused").to_string()
}

#[test]
fn values_of_all_types_come_back() {
    let values = [
        Value::U8(200),
        Value::I8(-100),
        Value::U16(60_000),
        Value::I16(-30_000),
        Value::U32(4_000_000_000),
        Value::I32(-2_000_000_000),
        Value::F32(-0.0),
        Value::Bool(true),
        Value::String("Grüße"),
        Value::U64(u64::MAX),
        Value::I64(i64::MIN),
        Value::F64(1e300),
    ];
    let mut writer = GgufWriter::new();
    for (index, value) in values.iter().enumerate() {
        writer.put(&format!("k{index}"), *value).expect("free");
    }
    let strings: Vec<String> = (0..1000).map(|i| "x".repeat(i % 7)).collect();
    writer.put_strings("strings", &strings).expect("free");
    writer.put_bools("bools", [true, false]).expect("free");
    writer.put_i32s("integers", [-1, 300]).expect("free");
    writer.put_f32s("floats", [0.5, -1.5]).expect("free");
    let file = GgufFile::from_bytes(writer.finish().bytes()).expect("valid");

    let read: Vec<Value<'_>> = file.metadata().map(|(_, value)| value).take(values.len()).collect();
    assert_eq!(read, values);
    assert_eq!(file.strings("strings").expect("strings"), strings);
    assert_eq!(file.bools("bools").expect("bools"), [true, false]);
    assert_eq!(file.integers::<i64>("integers").expect("integers"), [-1, 300]);
    assert_eq!(file.floats("floats").expect("floats"), [0.5, -1.5]);
    assert_eq!((file.version(), file.alignment(), file.tensors().len()), (3, 32, 0));

    // Copying arrays from file to file keeps their bytes.
    let mut copy = GgufWriter::new();
    for (key, value) in file.metadata() {
        copy.put(key, value).expect("free");
    }
    assert_eq!(copy.finish().bytes(), file.shard_bytes(0));
}

#[test]
fn getters_name_key_expected_and_found() {
    let mut writer = GgufWriter::new();
    writer.put("text", Value::String("abc\n")).expect("free");
    writer.put("small", Value::U8(7)).expect("free");
    writer.put("negative", Value::I32(-7)).expect("free");
    writer.put("large", Value::U64(1 << 40)).expect("free");
    writer.put_i32s("list", [1, -2]).expect("free");
    let file = GgufFile::from_bytes(writer.finish().bytes()).expect("valid");

    assert_eq!(file.u32("small").expect("integers of any width"), 7);
    assert_eq!(file.opt_u32("missing").expect("optional"), None);
    let rows: [(Result<String, GgufError>, &str); 8] = [
        (
            file.u32("text").map(|v| v.to_string()),
            r#"metadata key text: expected an unsigned 32-bit integer, found string "abc\n""#,
        ),
        (
            file.u32("negative").map(|v| v.to_string()),
            "metadata key negative: expected an unsigned 32-bit integer, found i32 -7",
        ),
        (
            file.u32("large").map(|v| v.to_string()),
            "metadata key large: expected an unsigned 32-bit integer, found u64 1099511627776",
        ),
        (
            file.str("missing").map(str::to_owned),
            "metadata key missing: expected a string, found no such key",
        ),
        (file.bool("small").map(|v| v.to_string()), "metadata key small: expected a bool, found u8 7"),
        (
            file.strings("list").map(|v| v.concat()),
            "metadata key list: expected an array of strings, found array an array of 2 i32",
        ),
        (
            file.integers::<u8>("list").map(|v| v.len().to_string()),
            "metadata key list: expected an array of integers in range, found array an array of 2 i32",
        ),
        (
            file.opt_f32("text").map(|v| format!("{v:?}")),
            r#"metadata key text: expected a float, found string "abc\n""#,
        ),
    ];
    for (result, expected) in rows {
        assert_eq!(result.expect_err("refused").to_string(), expected);
    }
}

#[test]
fn strings_in_arrays_are_checked_when_they_are_asked_for() {
    let bytes = Raw::header(0, 1).string("a").u32(9).u32(8).u64(2).string("ok").u64(1).raw(&[0xFF]).bytes();
    let file = GgufFile::from_bytes(bytes).expect("opens");
    assert_eq!(file.byte_strings("a").expect("bytes").collect::<Vec<_>>(), [&b"ok"[..], &[0xFF]]);
    let error = file.strings("a").expect_err("not text").to_string();
    assert_eq!(error, r#"metadata key a: expected UTF-8 text, found "\\xff" as string 1"#);
}

#[test]
fn version_2_is_read_like_version_3() {
    let mut writer = GgufWriter::new();
    writer.put("k", Value::U32(1)).expect("free");
    writer.tensor("t", &[4], GgmlType::F32).expect("fits");
    let header = writer.finish();
    let mut bytes = header.bytes().to_vec();
    bytes.resize(header.file_len() as usize, 0);
    bytes[4] = 2;
    let file = GgufFile::from_bytes(bytes).expect("valid");
    assert_eq!((file.version(), file.u32("k").expect("there")), (2, 1));
}

#[test]
fn tensor_data_is_written_in_pieces_of_any_size() {
    let mut writer = GgufWriter::new();
    writer.put("general.alignment", Value::U32(64)).expect("free");
    writer.tensor("a", &[3], GgmlType::F32).expect("fits");
    writer.tensor("b", &[32, 3], GgmlType::Q8_0).expect("fits");
    let header = writer.finish();
    let mut sink = header.stream(Vec::new()).expect("written");
    sink.write(&[1; 5]).expect("a piece");
    sink.write(&[1; 7]).expect("the rest of a");
    sink.write(&[2; 102]).expect("all of b");
    let bytes = sink.finish().expect("complete");
    assert_eq!(bytes.len() as u64, header.file_len());
    let file = GgufFile::from_bytes(&bytes).expect("valid");
    assert_eq!(file.alignment(), 64);
    for (name, byte, len) in [("a", 1, 12), ("b", 2, 102)] {
        let tensor = file.tensor(name).expect("there");
        assert_eq!(file.tensor_data(tensor), vec![byte; len]);
        assert_eq!(tensor.offset % 64, 0);
    }

    let mut sink = header.stream(Vec::new()).expect("written");
    assert!(sink.write(&[0; 13]).expect_err("past a").to_string().contains("takes 12 bytes"));
    assert!(
        sink.finish()
            .expect_err("incomplete")
            .to_string()
            .contains("data of 0 tensors was given, the table has 2")
    );
}

#[test]
fn the_writer_refuses_what_no_reader_takes() {
    let mut writer = GgufWriter::new();
    writer.put("k", Value::U8(0)).expect("free");
    writer.tensor("t", &[256], GgmlType::Q4_K).expect("fits");
    for (error, expected) in [
        (writer.put("k", Value::U8(1)).err(), "metadata key k is already set"),
        (writer.tensor("t", &[256], GgmlType::Q4_K).err(), "tensor t: the name is already taken"),
        (
            writer.tensor("u", &[100], GgmlType::Q4_K).err(),
            "tensor u: expected rows of a multiple of 256 values for Q4_K, found 100",
        ),
        (
            writer.tensor("v", &[1, 0], GgmlType::F32).err(),
            "tensor v: expected 1 to 4 dimensions above zero, found [1, 0]",
        ),
        (
            writer.put("general.alignment", Value::U32(64)).err(),
            "general.alignment must be a u32 power of two, set before the first tensor",
        ),
    ] {
        assert_eq!(error.expect("refused").to_string(), format!("cannot write this file: {expected}"));
    }
}

/// One part of a set: keys, and a tensor named after `name` filled with `byte`.
fn part(path: &Path, number: u16, count: u16, name: &str, byte: u8, change: impl Fn(&mut GgufWriter)) {
    let mut writer = GgufWriter::new();
    writer.put("split.no", Value::U16(number)).expect("free");
    writer.put("split.count", Value::U16(count)).expect("free");
    if number == 0 {
        writer.put("general.architecture", Value::String("muse-glimmer")).expect("free");
        writer.put("only.in.the.first", Value::U32(1)).expect("free");
    }
    change(&mut writer);
    writer.tensor(name, &[8], GgmlType::F32).expect("fits");
    let header = writer.finish();
    let mut sink = header.stream(Vec::new()).expect("written");
    sink.write(&[byte; 32]).expect("data");
    std::fs::write(path, sink.finish().expect("complete")).expect("written");
}

fn names(folder: &Path) -> [PathBuf; 3] {
    [1, 2, 3].map(|number| folder.join(format!("a model-{number:05}-of-00003.gguf")))
}

fn set(folder: &Path) -> [PathBuf; 3] {
    let names = names(folder);
    for (number, path) in names.iter().enumerate() {
        part(path, number as u16, 3, &format!("t{number}"), number as u8, |writer| {
            if number == 0 {
                writer.put("split.tensors.count", Value::I32(3)).expect("free");
            }
        });
    }
    names
}

#[test]
fn a_split_set_opens_from_any_of_its_parts() {
    let folder = tempfile::tempdir().expect("a folder");
    let names = set(folder.path());
    for path in &names {
        let file = GgufFile::open(path).expect("the set opens");
        assert_eq!((file.shard_count(), file.tensors().len(), file.path()), (3, 3, names[0].as_path()));
        assert_eq!(file.u32("only.in.the.first").expect("there"), 1);
        for number in 0..3_usize {
            let tensor = file.tensor(&format!("t{number}")).expect("there");
            assert_eq!((tensor.shard, file.tensor_data(tensor)), (number, &[number as u8; 32][..]));
        }
    }
}

#[test]
fn a_split_set_that_does_not_fit_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let check = |change: &dyn Fn(&[PathBuf; 3]), expected: &str| {
        let names = set(folder.path());
        change(&names);
        let error = message(GgufFile::open(&names[0]));
        assert!(error.contains(expected), "expected {expected:?} in {error:?}");
    };
    check(
        &|names| std::fs::remove_file(&names[1]).expect("removed"),
        "a model-00002-of-00003.gguf: No such file",
    );
    check(
        &|names| part(&names[1], 2, 3, "t1", 0, |_| ()),
        "00002-of-00003.gguf: metadata key split.no: expected 1 for part 2 of 3, found 2",
    );
    check(
        &|names| part(&names[1], 1, 2, "t1", 0, |_| ()),
        "00002-of-00003.gguf: metadata key split.count: expected 3 as in the first file, found 2",
    );
    check(
        &|names| part(&names[2], 2, 3, "t1", 0, |_| ()),
        "00003-of-00003.gguf: tensor name t1 is in part 2 of the set too",
    );
    check(
        &|names| {
            part(&names[2], 2, 3, "t2", 0, |writer| {
                writer.put("general.architecture", Value::String("llama")).expect("free");
            });
        },
        r#"general.architecture: expected "muse-glimmer" as in the first file, found "llama""#,
    );
    check(
        &|names| {
            part(&names[0], 0, 3, "t0", 0, |writer| {
                writer.put("split.tensors.count", Value::I32(4)).expect("free");
            });
        },
        "split.tensors.count: expected 3, the tensors of all 3 parts, found 4",
    );
    check(
        &|names| {
            let bytes = std::fs::read(&names[2]).expect("read");
            std::fs::write(&names[2], &bytes[..bytes.len() - 1]).expect("cut");
        },
        "00003-of-00003.gguf: tensor t2: 32 bytes at offset 0",
    );

    let names = set(folder.path());
    let renamed = folder.path().join("renamed.gguf");
    std::fs::rename(&names[0], &renamed).expect("renamed");
    assert!(
        message(GgufFile::open(&renamed))
            .contains("one part of 3: expected a name that ends in -NNNNN-of-00003.gguf")
    );
    let bytes = std::fs::read(&renamed).expect("read");
    assert!(
        message(GgufFile::from_bytes(&bytes))
            .contains("one part of a split set of 3 cannot be opened from memory")
    );
    part(&renamed, 0, 60_000, "t", 0, |_| ());
    assert!(
        message(GgufFile::open(&renamed)).contains("split.count: expected at most 1000 parts, found 60000")
    );
}
