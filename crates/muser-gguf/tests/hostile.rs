//! Files that are damaged or made to do harm: each is refused, at once, with a message that names the fault.
//!
//! The first column says what the file does, the last is the whole message without the path.

mod common;

use std::time::{Duration, Instant};

use common::{Raw, STRING, check_refused};
use muser_gguf::GgufFile;

#[test]
fn containers() {
    check_refused("empty", vec![], "the file is empty");
    check_refused(
        "three bytes",
        b"GGU".to_vec(),
        "the magic of 4 bytes at byte 0 does not fit: 3 bytes are left",
    );
    check_refused(
        "another format",
        b"PK\x03\x04....".to_vec(),
        r#"expected a GGUF file (first bytes "GGUF"), found "PK\\x03\\x04""#,
    );
    check_refused(
        "a git-lfs pointer",
        b"version https://git-lfs.github.com/spec/v1\n".to_vec(),
        r#"expected a GGUF file (first bytes "GGUF"), found "vers"; this looks like a git-lfs pointer, not the file itself"#,
    );
    check_refused("version 1", Raw::with_version(1).bytes(), "expected GGUF version 2 or 3, found 1");
    check_refused("version 4", Raw::with_version(4).bytes(), "expected GGUF version 2 or 3, found 4");
    check_refused(
        "big-endian",
        Raw::with_version(3_u32.swap_bytes()).bytes(),
        "expected a little-endian file, found big-endian GGUF version 3",
    );
    check_refused(
        "magic only",
        b"GGUF".to_vec(),
        "the version of 4 bytes at byte 4 does not fit: 0 bytes are left",
    );
}

#[test]
fn counts_that_the_file_has_no_room_for() {
    let start = Instant::now();
    check_refused(
        "24 bytes that claim 500,000,000 keys",
        Raw::header(0, 500_000_000).bytes(),
        "the header claims 500000000 metadata keys, the 0 bytes after it have room for 0",
    );
    check_refused(
        "keys beyond counting",
        Raw::header(0, u64::MAX).zeros(130).bytes(),
        "the header claims 18446744073709551615 metadata keys, the 130 bytes after it have room for 10",
    );
    check_refused(
        "tensors beyond counting",
        Raw::header(u64::MAX, 0).zeros(64).bytes(),
        "the header claims 18446744073709551615 tensors, the 64 bytes after it have room for 2",
    );
    check_refused(
        "more tensors than any model has, in a file with room for them",
        Raw::header(100_000, 0).zeros(100_000 * 32).bytes(),
        "expected at most 65536 tensors, found 100000",
    );
    check_refused(
        "more keys than any model has",
        Raw::header(0, 100_000).zeros(100_000 * 13).bytes(),
        "expected at most 65536 metadata keys, found 100000",
    );
    assert!(start.elapsed() < Duration::from_millis(500), "refused without work");
}

#[test]
fn metadata() {
    check_refused(
        "a key longer than the file",
        Raw::header(0, 1).u64(1 << 30).zeros(20).bytes(),
        "metadata key 0: its name of 1073741824 bytes at byte 32 does not fit: 20 bytes are left",
    );
    check_refused(
        "a string of 1 GiB in 160 bytes",
        Raw::header(0, 1).string("s").u32(STRING).u64(1 << 30).zeros(111).bytes(),
        "metadata key 0: s: a string of 1073741824 bytes at byte 45 does not fit: 111 bytes are left",
    );
    check_refused(
        "a string length that wraps",
        Raw::header(0, 1).string("s").u32(STRING).u64(u64::MAX).zeros(8).bytes(),
        "metadata key 0: s: a string of 18446744073709551615 bytes at byte 45 does not fit: 8 bytes are left",
    );
    check_refused(
        "an empty key",
        Raw::header(0, 1).string("").u32(STRING).string("").zeros(8).bytes(),
        "metadata key 0: expected a name of 1 to 65535 bytes, found 0",
    );
    check_refused(
        "a key with an escape sequence",
        Raw::header(0, 1).string("a\x1b[2J").u32(STRING).string("").bytes(),
        r#"metadata key 0: expected a name without control characters, found "a\u{1b}[2J""#,
    );
    check_refused(
        "a key that is not text",
        Raw::header(0, 1).u64(2).raw(&[0xC3, 0x28]).zeros(16).bytes(),
        "metadata key 0: its name at byte 24 is not UTF-8: invalid utf-8 sequence of 1 bytes from index 0",
    );
    check_refused(
        "a value that is not text",
        Raw::header(0, 1).string("k").u32(STRING).u64(1).raw(&[0xFF]).bytes(),
        "metadata key 0: k: a string at byte 37 is not UTF-8: invalid utf-8 sequence of 1 bytes from index 0",
    );
    check_refused(
        "an unknown type",
        Raw::header(0, 1).string("k").u32(13).zeros(8).bytes(),
        "metadata key 0: k: expected a value type 0 to 12, found 13",
    );
    check_refused(
        "a bool of 2",
        Raw::header(0, 1).string("k").u32(7).raw(&[2]).bytes(),
        "metadata key 0: k: expected a bool (0 or 1), found 2",
    );
    check_refused(
        "the same key twice",
        Raw::header(0, 2).string("k").u32(4).u32(1).string("k").u32(4).u32(2).bytes(),
        "metadata key k appears twice",
    );
    check_refused(
        "a value cut short",
        Raw::header(0, 1).string("k").u32(10).zeros(7).bytes(),
        "metadata key 0: k: a u64 of 8 bytes at byte 37 does not fit: 7 bytes are left",
    );
}

#[test]
fn arrays() {
    let array = |element: u32, count: u64| Raw::header(0, 1).string("a").u32(9).u32(element).u64(count);
    check_refused(
        "an array longer than the file",
        array(4, 1 << 62).zeros(40).bytes(),
        "metadata key 0: a: an array of 4611686018427387904 u32 does not fit: 40 bytes are left",
    );
    check_refused(
        "a count that wraps when multiplied by the width",
        array(12, (1 << 61) + 1).zeros(40).bytes(),
        "metadata key 0: a: an array of 2305843009213693953 f64 does not fit: 40 bytes are left",
    );
    check_refused(
        "strings that cannot all be there",
        array(8, 6).zeros(40).bytes(),
        "metadata key 0: a: an array of 6 string does not fit: 40 bytes are left",
    );
    check_refused(
        "a string in an array beyond the end",
        array(8, 2).string("x").u64(99).bytes(),
        "metadata key 0: a: a string in an array of 99 bytes at byte 66 does not fit: 0 bytes are left",
    );
    check_refused(
        "an unknown element type",
        array(77, 1).zeros(40).bytes(),
        "metadata key 0: a: expected an array element type 0 to 12, found 77",
    );
    check_refused(
        "a bool of 255 in an array",
        array(7, 3).raw(&[0, 1, 255]).bytes(),
        "metadata key 0: a: expected bools (0 or 1) in an array, found 255",
    );
    let mut nested = array(9, 1);
    for _ in 0..100_000 {
        nested = nested.u32(9).u64(1);
    }
    check_refused(
        "arrays nested 100,000 deep",
        nested.bytes(),
        "metadata key 0: a: arrays are nested deeper than 4 levels",
    );
    // A million empty arrays in an array are odd but well formed; what counts is that they cost little.
    let mut wide = array(9, 1_000_000);
    for _ in 0..1_000_000 {
        wide = wide.u32(4).u64(0);
    }
    let start = Instant::now();
    let file = GgufFile::from_bytes(wide.bytes()).expect("well formed");
    assert_eq!(file.array("a").expect("there").len(), 1_000_000);
    assert!(start.elapsed() < Duration::from_secs(1));
}

#[test]
fn alignments() {
    for (alignment, found) in [
        (0, "u32 0"),
        (1, "u32 1"),
        (4, "u32 4"),
        (24, "u32 24"),
        (1 << 17, "u32 131072"),
        (1 << 30, "u32 1073741824"),
    ] {
        check_refused(
            &format!("alignment {alignment}"),
            Raw::header(0, 1).string("general.alignment").u32(4).u32(alignment).zeros(100).bytes(),
            &format!(
                "metadata key general.alignment: expected a u32 power of two from 8 to 65536, found {found}"
            ),
        );
    }
    check_refused(
        "an alignment of another type",
        Raw::header(0, 1).string("general.alignment").u32(STRING).string("32").bytes(),
        r#"metadata key general.alignment: expected a u32 power of two from 8 to 65536, found string "32""#,
    );
}

#[test]
fn tensor_entries() {
    let one = |dims: &[u64], ty: u32, offset: u64| Raw::header(1, 0).tensor("t", dims, ty, offset).zeros(64);
    check_refused(
        "a size that wraps to a small number",
        one(&[4, (1 << 62) + 1], 0, 0).bytes(),
        "tensor 0: t: its dimensions [4, 4611686018427387905] of type F32 overflow the size of a file",
    );
    check_refused(
        "dimension 1 of 2^42 + 1",
        one(&[1 << 22, (1 << 42) + 1], 0, 0).bytes(),
        "tensor 0: t: its dimensions [4194304, 4398046511105] of type F32 overflow the size of a file",
    );
    check_refused(
        "a size beyond signed arithmetic",
        one(&[1 << 61], 0, 0).bytes(),
        "tensor 0: t: its dimensions [2305843009213693952] of type F32 overflow the size of a file",
    );
    check_refused(
        "a dimension of zero",
        one(&[32, 0], 0, 0).bytes(),
        "tensor 0: t: expected dimension 1 above zero, found 0",
    );
    check_refused(
        "no dimensions",
        one(&[], 0, 0).bytes(),
        "tensor 0: t: expected 1 to 4 dimensions, found 0",
    );
    check_refused(
        "five dimensions",
        one(&[1, 1, 1, 1, 1], 0, 0).bytes(),
        "tensor 0: t: expected 1 to 4 dimensions, found 5",
    );
    check_refused(
        "dimensions beyond counting",
        Raw::header(1, 0).string("t").u32(u32::MAX).zeros(64).bytes(),
        "tensor 0: t: expected 1 to 4 dimensions, found 4294967295",
    );
    check_refused(
        "rows that are no whole blocks",
        one(&[100], 12, 0).bytes(),
        "tensor 0: t: expected rows of a multiple of 256 values for Q4_K, found 100",
    );
    check_refused(
        "a removed type",
        one(&[32], 4, 0).bytes(),
        "tensor 0: t: expected a ggml type that muser knows, found 4 (Q4_2, removed from the format)",
    );
    check_refused(
        "an unknown type",
        one(&[32], 99, 0).bytes(),
        "tensor 0: t: expected a ggml type that muser knows, found 99",
    );
    check_refused(
        "an empty name",
        Raw::header(1, 0).tensor("", &[1], 0, 0).zeros(64).bytes(),
        "tensor 0: expected a name of 1 to 256 bytes, found 0",
    );
    check_refused(
        "a name of 257 bytes",
        Raw::header(1, 0).tensor(&"n".repeat(257), &[1], 0, 0).zeros(64).bytes(),
        "tensor 0: expected a name of 1 to 256 bytes, found 257",
    );
    check_refused(
        "a table cut short",
        Raw::header(1, 0).string("tensor_name").u32(2).u64(32).zeros(4).bytes(),
        "tensor 0: tensor_name: a dimension of 8 bytes at byte 55 does not fit: 4 bytes are left",
    );
}

#[test]
fn tensor_places() {
    let two = |second: &str, offsets: [u64; 2]| {
        Raw::header(2, 0)
            .tensor("a", &[16], 0, offsets[0])
            .tensor(second, &[16], 0, offsets[1])
            .pad(32)
            .zeros(128)
    };
    GgufFile::from_bytes(two("b", [0, 64]).bytes()).expect("this one is fine");
    GgufFile::from_bytes(two("b", [64, 0]).bytes()).expect("so is any order");
    check_refused(
        "the same name twice",
        two("a", [0, 64]).bytes(),
        "tensor name a appears twice, as tensor 0 and 1",
    );
    check_refused(
        "the same place twice",
        two("b", [0, 0]).bytes(),
        "tensors a (bytes 96 to 160) and b (from byte 96) overlap",
    );
    check_refused(
        "places that overlap in part",
        two("b", [32, 0]).bytes(),
        "tensors b (bytes 96 to 160) and a (from byte 128) overlap",
    );
    // The last values of 36 bytes lie in what padding to 32 would be.
    let uneven = |second: u64| {
        Raw::header(2, 0).tensor("a", &[9], 0, 0).tensor("b", &[8], 0, second).pad(32).zeros(128).bytes()
    };
    GgufFile::from_bytes(uneven(64)).expect("behind the padding");
    check_refused(
        "places that overlap by less than the alignment",
        uneven(32),
        "tensors a (bytes 96 to 132) and b (from byte 128) overlap",
    );
    check_refused(
        "an offset off the alignment",
        two("b", [0, 65]).bytes(),
        "tensor b: expected an offset that is a multiple of 32, found 65",
    );
    check_refused(
        "data beyond the end",
        two("b", [0, 96]).bytes(),
        "tensor b: 64 bytes at offset 96 of the data section (which starts at 96) end beyond the file's 224 bytes; \
         the file is cut short or damaged",
    );
    check_refused(
        "an offset that wraps",
        two("b", [0, u64::MAX - 31]).bytes(),
        "tensor b: 64 bytes at offset 18446744073709551584 of the data section (which starts at 96) end beyond the \
         file's 224 bytes; the file is cut short or damaged",
    );
    let huge = 1_u64 << 60;
    let mut many = Raw::header(9, 0);
    for index in 0..9 {
        many = many.tensor(&format!("t{index}"), &[huge], 24 /* I8 */, 0);
    }
    // Sizes that pass one by one, 2^60 bytes each; sixteen of 2^60 would wrap, nine are past the file anyway.
    check_refused(
        "sizes that each pass",
        many.zeros(64).bytes(),
        "tensor t0: 1152921504606846976 bytes at offset 0 of the data section (which starts at 352) end beyond the \
         file's 394 bytes; the file is cut short or damaged",
    );
    let mut more = Raw::header(16, 0);
    for index in 0..16 {
        more = more.tensor(&format!("t{index:02}"), &[huge], 24, 0);
    }
    check_refused(
        "a padded total that wraps",
        more.zeros(64).bytes(),
        "tensor t15: the padded sizes up to it overflow 64 bits",
    );
}

#[test]
fn files_that_are_no_files() {
    let folder = tempfile::tempdir().expect("a folder");
    let error = GgufFile::open(folder.path()).expect_err("a folder").to_string();
    assert!(error.ends_with("expected a GGUF file, found a directory"), "{error}");
    let path = folder.path().join("empty.gguf");
    std::fs::write(&path, b"").expect("written");
    assert!(GgufFile::open(&path).expect_err("empty").to_string().ends_with("empty.gguf: the file is empty"));
    let error = GgufFile::open(folder.path().join("missing.gguf")).expect_err("missing").to_string();
    assert!(error.contains("missing.gguf: No such file"), "{error}");
    #[cfg(unix)]
    {
        let error = GgufFile::open("/dev/null").expect_err("a device").to_string();
        assert_eq!(error, "/dev/null: expected a regular file, which can be mapped");
        // Opening a pipe for reading waits for a writer; looking at it first does not.
        let pipe = folder.path().join("pipe.gguf");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo is there");
        assert!(made.success());
        let error = GgufFile::open(&pipe).expect_err("a pipe").to_string();
        assert!(error.ends_with("expected a regular file, which can be mapped"), "{error}");
    }
}

#[test]
fn a_header_without_tensors_opens() {
    let file = GgufFile::from_bytes(Raw::header(0, 1).string("k").u32(4).u32(7).bytes()).expect("valid");
    assert_eq!(file.tensors().len(), 0);
    assert_eq!(file.u32("k").expect("there"), 7);
}

#[test]
fn a_missing_last_padding_is_fine() {
    // 65 bytes of data, the file ends with them.
    let bytes = Raw::header(1, 0).tensor("t", &[65], 24, 0).pad(32).zeros(65).bytes();
    assert_eq!(GgufFile::from_bytes(bytes).expect("valid").tensors()[0].len, 65);
}
