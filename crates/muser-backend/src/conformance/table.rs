//! A model whose embedding table has a factor, and which is still the same model to the bit.

use std::sync::Arc;

use half::f16;
use muser_gguf::{GgmlType, GgufFile, GgufWriter};
use muser_model::Model;

/// `model` with a table 128 times as large and a factor that takes it back: a power of two, so that every row is the same to
/// the bit where the factor is applied. For tables of Q6_K and Q8_0.
///
/// A backend that forgets the factor shows it in what a draft proposes: a target norms its rows and hides it.
///
/// # Panics
/// When the table has another type, or the file another shape than models have.
pub fn with_factor_on_table(model: &Model) -> Model {
    const TIMES: f32 = 128.0;
    let table = &model.token_embd;
    let scale_at = match table.ty {
        GgmlType::Q6_K => 208,
        GgmlType::Q8_0 => 0,
        other => panic!("a table of Q6_K or Q8_0, found {}", other.name()),
    };
    let mut writer = GgufWriter::new();
    for (key, value) in model.file.metadata() {
        writer.put(key, value).expect("unique keys");
    }
    for tensor in model.file.tensors() {
        writer.tensor(&tensor.name, &tensor.dims, tensor.ty).expect("a valid tensor");
    }
    writer.tensor("token_embd.scale", &[1], GgmlType::F32).expect("no factor yet");
    let header = writer.finish();
    let mut sink = header.stream(Vec::new()).expect("memory");
    for tensor in model.file.tensors() {
        let mut bytes = model.file.tensor_data(tensor).to_vec();
        if tensor.name == table.name {
            for block in bytes.chunks_exact_mut(table.ty.block_bytes()) {
                let scale = f16::from_le_bytes([block[scale_at], block[scale_at + 1]]).to_f32() * TIMES;
                assert!(scale.abs() < f16::MAX.to_f32(), "the table's scales leave room");
                block[scale_at..scale_at + 2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
            }
        }
        sink.write(&bytes).expect("memory");
    }
    sink.write(&(1.0 / TIMES).to_le_bytes()).expect("memory");
    let bytes = sink.finish().expect("complete");
    Model::from_gguf(Arc::new(GgufFile::from_bytes(bytes).expect("a file"))).expect("a model")
}
