//! Scalar dequantisation agrees bit for bit with an independent implementation, on random bytes.
//!
//! The fixture and its maker are in `fixtures/`. Random bytes reach scales that are infinite or not a number; a NaN must
//! be a NaN on both sides, its payload is not compared.

use muser_gguf::{GgmlType, GgufError, GgufFile, dequantize_row};

fn fixture() -> GgufFile {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/dequant.gguf");
    GgufFile::open(path).expect("the fixture opens")
}

#[test]
#[cfg_attr(miri, ignore = "Miri maps no files")]
fn every_type_agrees_with_the_reference_package() {
    let file = fixture();
    let mut seen = Vec::new();
    for ty in GgmlType::all().filter(|ty| ty.is_decodable() && *ty != GgmlType::Q8_K) {
        let tensor = file.tensor(ty.name()).expect("each decodable type has a tensor");
        let expected = file.tensor(&format!("{}.expected", ty.name())).expect("and its values");
        assert_eq!((tensor.ty, &tensor.dims), (ty, &expected.dims));
        let mut values = vec![0.0; tensor.values() as usize];
        dequantize_row(ty, file.tensor_data(tensor), &mut values).expect("whole blocks");
        let mut finite = 0;
        for (index, (value, bytes)) in
            values.iter().zip(file.tensor_data(expected).chunks_exact(4)).enumerate()
        {
            let expected = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            let same = value.to_bits() == expected.to_bits() || value.is_nan() && expected.is_nan();
            assert!(same, "{} value {index}: expected {expected:?}, found {value:?}", ty.name());
            finite += usize::from(expected.is_finite());
        }
        assert!(finite * 2 > values.len(), "{}: too few finite values to prove anything", ty.name());
        seen.push(ty);
    }
    assert_eq!(seen.len(), 17);
}

#[test]
fn a_row_is_its_blocks_whatever_bytes_they_have() {
    let mut state = 1_u32;
    let mut seen = 0;
    for ty in GgmlType::all().filter(|ty| ty.is_decodable()) {
        let (bytes, count) = (ty.block_bytes(), ty.block_len());
        let row: Vec<u8> = (0..5 * bytes)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 24) as u8
            })
            .collect();
        let decoded = |blocks: &[u8]| {
            let mut values = vec![f32::MAX; blocks.len() / bytes * count];
            dequantize_row(ty, blocks, &mut values).expect("whole blocks");
            values.into_iter().map(|v| if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() }).collect()
        };
        let whole: Vec<u32> = decoded(&row);
        let apart: Vec<u32> = row.chunks_exact(bytes).flat_map(decoded).collect();
        assert_eq!(whole, apart, "{}", ty.name());
        seen += 1;
    }
    assert_eq!(seen, 18);
}

#[test]
fn q8_k_blocks_are_scale_times_integer() {
    let mut block = vec![0_u8; 292];
    block[..4].copy_from_slice(&0.5_f32.to_le_bytes());
    block[4] = 3;
    block[259] = (-7_i8).cast_unsigned();
    let mut values = [0.0; 256];
    dequantize_row(GgmlType::Q8_K, &block, &mut values).expect("one block");
    assert_eq!((values[0], values[1], values[255]), (1.5, 0.0, -3.5));
}

#[test]
fn wrong_lengths_and_codebook_types_are_refused() {
    let mut values = [0.0; 256];
    for (len, count) in [(143, 256), (145, 256), (288, 256), (0, 256), (144, 255), (144, 0)] {
        let error = dequantize_row(GgmlType::Q4_K, &vec![0; len], &mut values[..count]).expect_err("refused");
        assert!(matches!(error, GgufError::RowLength { .. }), "{error}");
    }
    for ty in GgmlType::all().filter(|ty| ty.name().starts_with("IQ") && !ty.name().starts_with("IQ4")) {
        let error = dequantize_row(ty, &vec![0; ty.block_bytes()], &mut values).expect_err("refused");
        assert!(error.to_string().contains(ty.name()) && error.to_string().contains("Q3_K"), "{error}");
    }
}
