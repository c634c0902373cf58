//! Containers of weights: GGUF, and the table of safetensors.

use std::collections::BTreeMap;

use muser_gguf::{GgmlType, GgufFile, GgufWriter, Value, ValueType, dequantize_row};

use crate::{Target, check_message};

/// A GGUF file, byte for byte. What was read and written again says the same.
pub const GGUF: Target = Target {
    name: "gguf",
    about: "opening, every value and tensor; read, written and read again",
    run: gguf,
    seeds: gguf_seeds,
    words: &[
        "GGUF",
        "general.alignment",
        "general.architecture",
        "\\x03\\x00\\x00\\x00",
        "\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x80",
        "split.count",
    ],
    max_len: 4096,
    memory: (64 << 10, 512),
    millis: (100, 20),
};

fn gguf(data: &[u8]) {
    match GgufFile::from_bytes(data) {
        Err(error) => check_message(&error.to_string()),
        Ok(file) => {
            use_it(&file);
            if let Some(again) = written_again(&file) {
                let again = GgufFile::from_bytes(&again).expect("what the writer writes is read");
                let said = |file: &GgufFile| -> BTreeMap<String, String> {
                    file.metadata().map(|(key, value)| (key.to_owned(), shown(value))).collect()
                };
                assert_eq!(said(&file), said(&again));
                let table = |file: &GgufFile| -> Vec<_> {
                    let row = |t: &muser_gguf::TensorInfo| {
                        (t.name.clone(), t.dims.clone(), t.ty, file.tensor_data(t).to_vec())
                    };
                    file.tensors().iter().map(row).collect()
                };
                assert_eq!(table(&file), table(&again));
            }
        }
    }
}

/// By its bits: what is no number equals itself.
fn shown(value: Value<'_>) -> String {
    match value {
        Value::Array(array) => format!("{:?} {:?} {:?}", array.element(), array.len(), array.raw_bytes()),
        Value::F32(value) => format!("f32 {:08x}", value.to_bits()),
        Value::F64(value) => format!("f64 {:016x}", value.to_bits()),
        other => format!("{other:?}"),
    }
}

fn use_it(file: &GgufFile) {
    let mut sum = 0_usize;
    for (key, value) in file.metadata() {
        sum += key.len() + value.describe().len();
        if let Value::Array(array) = value {
            sum += array.byte_strings().map_or(0, |strings| strings.map(<[u8]>::len).sum());
            sum += array.scalars().map_or(0, |scalars| scalars.filter_map(Value::as_integer).count());
        }
        let _ = (file.str(key), file.u32(key), file.f32(key), file.bool(key), file.strings(key));
        let _ = (file.integers::<u8>(key), file.floats(key), file.bools(key));
    }
    for tensor in file.tensors() {
        let data = file.tensor_data(tensor);
        assert_eq!(data.len(), tensor.len);
        let block = tensor.ty.block_bytes();
        let mut values = vec![0.0; tensor.ty.block_len()];
        if let Some(first) = data.get(..block) {
            let _ = dequantize_row(tensor.ty, first, &mut values);
        }
        assert!(file.tensor(&tensor.name).is_some());
    }
    std::hint::black_box(sum);
}

/// `None` where the writer has no form for something.
fn written_again(file: &GgufFile) -> Option<Vec<u8>> {
    let mut writer = GgufWriter::new();
    for (key, value) in file.metadata() {
        match value {
            Value::Array(array) if array.element() == ValueType::String => {
                writer.put_strings(key, array.byte_strings()?).ok()?;
            }
            Value::Array(array) => {
                let mut values = array.scalars()?;
                match array.element() {
                    ValueType::Bool => writer
                        .put_bools(key, values.by_ref().map(|value| matches!(value, Value::Bool(true))))
                        .ok()?,
                    ValueType::I32 => writer
                        .put_i32s(key, values.filter_map(|v| i32::try_from(v.as_integer()?).ok()))
                        .ok()?,
                    _ => return None,
                };
            }
            value => drop(writer.put(key, value).ok()?),
        }
    }
    for tensor in file.tensors() {
        writer.tensor(&tensor.name, &tensor.dims, tensor.ty).ok()?;
    }
    let header = writer.finish();
    let mut bytes = header.bytes().to_vec();
    bytes.resize(usize::try_from(header.file_len()).ok()?, 0);
    for (index, tensor) in file.tensors().iter().enumerate() {
        let (at, len) = header.place(index);
        bytes[at as usize..(at + len) as usize].copy_from_slice(file.tensor_data(tensor));
    }
    Some(bytes)
}

fn gguf_seeds() -> Vec<Vec<u8>> {
    let mut writer = GgufWriter::new();
    let scalars = [
        Value::U8(1),
        Value::I16(-2),
        Value::U32(3),
        Value::F32(0.5),
        Value::Bool(true),
        Value::String("text"),
        Value::U64(4),
        Value::F64(0.25),
    ];
    writer.put("general.alignment", Value::U32(64)).unwrap();
    for (index, value) in scalars.into_iter().enumerate() {
        writer.put(&format!("s.{index}"), value).unwrap();
    }
    writer.put_strings("strings", ["a", "", "längeres", "d"]).unwrap();
    writer.put_bools("bools", [true, false, true]).unwrap();
    writer.put_i32s("integers", [1, 2, -3]).unwrap();
    writer.put_f32s("floats", [1.0, f32::NAN]).unwrap();
    for (index, (dims, ty)) in [
        (&[32_u64, 2][..], GgmlType::Q8_0),
        (&[256], GgmlType::Q4_K),
        (&[5], GgmlType::F32),
        (&[64, 2], GgmlType::NVFP4),
    ]
    .into_iter()
    .enumerate()
    {
        writer.tensor(&format!("blk.{index}.weight"), dims, ty).unwrap();
    }
    let header = writer.finish();
    let mut whole = header.bytes().to_vec();
    whole.resize(header.file_len() as usize, 0x3C);
    let mut small = GgufWriter::new();
    small.put("general.architecture", Value::String("muse-glimmer")).unwrap();
    small.tensor("a", &[1], GgmlType::F32).unwrap();
    let header = small.finish();
    let mut few = header.bytes().to_vec();
    few.resize(header.file_len() as usize, 0);
    vec![whole, few]
}

/// The table of a safetensors file: what is believed of it lies in the data, side by side and without a gap.
pub const SAFETENSORS: Target = Target {
    name: "safetensors",
    about: "tensors of a table that is believed fill the data and do not overlap",
    run: safetensors,
    seeds: safetensors_seeds,
    words: &[
        "\"dtype\":",
        "\"shape\":",
        "\"data_offsets\":",
        "\"BF16\"",
        "\"F8_E4M3\"",
        "\"U8\"",
        "__metadata__",
        "18446744073709551615",
    ],
    max_len: 4096,
    memory: (64 << 10, 256),
    millis: (100, 20),
};

fn safetensors(data: &[u8]) {
    let Some((len, table)) = data.split_first_chunk::<2>() else { return };
    let len = u64::from(u16::from_le_bytes(*len));
    match muser_convert::fuzzing::table(table, len) {
        Err(error) => check_message(&error.to_string()),
        Ok(mut entries) => {
            entries.sort_by_key(|(_, at, len)| (*at, *len));
            let mut next = 8 + table.len() as u64;
            for (name, at, len) in &entries {
                assert_eq!(*at, next, "{name}");
                next += len;
            }
            assert_eq!(next, 8 + table.len() as u64 + len);
            let mut names: Vec<_> = entries.iter().map(|(name, ..)| name).collect();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), entries.len(), "a name twice");
        }
    }
}

fn safetensors_seeds() -> Vec<Vec<u8>> {
    let tables = [
        (0, r#"{"__metadata__":{"format":"pt"}}"#),
        (
            24,
            r#"{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"b":{"dtype":"U8","shape":[8],"data_offsets":[16,24]}}"#,
        ),
        (
            4,
            r#"{"x":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]},"e":{"dtype":"F8_E4M3","shape":[0],"data_offsets":[4,4]}}"#,
        ),
        (3, r#"{"o":{"dtype":"I7","shape":[9],"data_offsets":[0,3]}}"#),
    ];
    tables.iter().map(|(len, table)| [&u16::to_le_bytes(*len)[..], table.as_bytes()].concat()).collect()
}
