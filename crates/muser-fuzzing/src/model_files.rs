//! What a model says of itself: headers of text model, draft and projector, and checkpoints of other programs.

use std::path::Path;
use std::sync::{Arc, LazyLock};

use muser_convert::synth::SynthKind;
use muser_convert::{Choices, convert};
use muser_gguf::{GgmlType, GgufFile, GgufWriter, Value, ValueType};
use muser_model::cost::{Cost, CostOptions};
use muser_model::synth::{self, Mix, Preset, SynthOptions};
use muser_model::{DflashConfig, Draft, Geometry, Model, Projector, VisionConfig};

use crate::{Input, Target, check_message, folder};

/// Keys and tensors of a valid file changed: it is refused with a reason, or everything that is read of it lies in it.
pub const HEADERS: Target = Target {
    name: "model_headers",
    about: "text, draft and projector files with changed keys and tensors: refused, or all of it lies in the file",
    run: headers,
    seeds: header_seeds,
    words: &[],
    max_len: 256,
    memory: (8 << 20, 4096),
    millis: (200, 50),
};

fn geometry() -> Geometry {
    Geometry {
        hidden: 64,
        ffn: 64,
        heads: 2,
        kv_heads: 1,
        head_dim: 32,
        vocab: 268,
        context: 512,
        sliding: Geometry::period_of_four(4),
        window: 64,
        ..Preset::Tiny.geometry()
    }
}

/// The three kinds, their data left out.
static FILES: LazyLock<[GgufFile; 3]> = LazyLock::new(|| {
    let q8 = Mix::Uniform(GgmlType::Q8_0);
    let mut options = SynthOptions::new(Preset::Tiny, q8);
    options.geometry = Some(geometry());
    let draft = DflashConfig {
        hidden: 64,
        ffn: 64,
        heads: 2,
        kv_heads: 1,
        head_dim: 32,
        context: 512,
        window: 64,
        sliding: vec![true; 2],
        rope_theta: 1e4,
        rms_eps: 1e-5,
        block_size: 8,
        target_layers: vec![1, 3],
        mask_token: 200,
        vocab: None,
    };
    let vision = VisionConfig {
        layers: 2,
        hidden: 32,
        ffn: 64,
        heads: 4,
        image: 56,
        projection: 64,
        ..VisionConfig::released()
    };
    let text = synth::to_bytes(&options).expect("possible");
    let draft = synth::draft_to_bytes(&draft, q8, 1).expect("possible");
    let vision = synth::projector_to_bytes(&vision, Mix::Uniform(GgmlType::F32), 1).expect("possible");
    [text, draft, vision].map(|bytes| GgufFile::from_bytes(bytes).expect("valid"))
});

fn headers(data: &[u8]) {
    let mut input = Input::new(data);
    let kind = input.below(3);
    let Some(bytes) = changed(&FILES[kind], &mut input) else { return };
    let file = match GgufFile::from_bytes(bytes) {
        Ok(file) => Arc::new(file),
        Err(error) => return check_message(&error.to_string()),
    };
    let opened = match kind {
        0 => Model::from_gguf(Arc::clone(&file)).map(|model| {
            let geometry = model.geometry;
            assert!(geometry.heads % geometry.kv_heads == 0 && geometry.head_dim % 2 == 0, "{geometry:?}");
            let cost = Cost::of_file(&file, &geometry, CostOptions::default());
            assert!(cost.tensor_bytes <= file.shard_bytes(0).len() as u64, "{cost:?}");
            assert!(cost.kv.slot_bytes() > 0 && cost.memory_bytes() >= cost.kv.slot_bytes());
        }),
        1 => Draft::from_gguf(Arc::clone(&file)).map(|draft| {
            assert!(draft.matrices().all(|matrix| !matrix.bytes().is_empty() && matrix.row_bytes() > 0));
            assert_eq!(draft.layers.len(), draft.config.sliding.len());
        }),
        _ => Projector::from_gguf(Arc::clone(&file)).map(drop),
    };
    if let Err(error) = opened {
        check_message(&error.to_string());
    }
}

/// The file with some keys and tensors of other kinds; its data is zeros.
fn changed(file: &GgufFile, input: &mut Input<'_>) -> Option<Vec<u8>> {
    let count = file.metadata().count() + file.tensors().len();
    let changes: Vec<(usize, u8, i64)> =
        (0..input.below(5)).map(|_| (input.below(count), input.byte(), input.number())).collect();
    let change =
        |at: usize| changes.iter().find(|(changed, ..)| *changed == at).map(|(_, how, to)| (*how, *to));
    let mut writer = GgufWriter::new();
    let mut at = 0;
    for (key, value) in file.metadata() {
        put(&mut writer, key, value, change(at))?;
        at += 1;
    }
    for tensor in file.tensors() {
        let (mut name, mut dims, mut ty) = (tensor.name.clone(), tensor.dims.clone(), tensor.ty);
        if let Some((how, to)) = change(at) {
            let len = dims.len();
            match how % 6 {
                0 => name.push('x'),
                1 => dims[to.unsigned_abs() as usize % len] = to.unsigned_abs() % 4096,
                2 => dims.swap(0, len - 1),
                3 => ty = GgmlType::all().nth(to.unsigned_abs() as usize % 40).unwrap_or(ty),
                4 => dims.push(to.unsigned_abs() % 4),
                _ => {
                    at += 1;
                    continue;
                }
            }
        }
        at += 1;
        writer.tensor(&name, &dims, ty).ok()?;
    }
    let header = writer.finish();
    let len = usize::try_from(header.file_len()).ok().filter(|len| *len < 2 << 20)?;
    let mut bytes = header.bytes().to_vec();
    bytes.resize(len, 0);
    Some(bytes)
}

fn put(writer: &mut GgufWriter, key: &str, value: Value<'_>, change: Option<(u8, i64)>) -> Option<()> {
    if let Some((how, to)) = change {
        let changed = match how % 10 {
            0 => return Some(()),
            1 => Value::U32(to as u32),
            2 => Value::I32(to as i32),
            3 => Value::U64(to as u64),
            4 => Value::F32(to as f32),
            5 => Value::F32(f32::from_bits(to as u32)),
            6 => Value::Bool(to & 1 == 1),
            7 => Value::String("other"),
            8 => {
                let list = (0..to.unsigned_abs() % 70).map(|i| (i as i64 ^ to) as i32);
                return writer.put_i32s(key, list).ok().map(drop);
            }
            _ => return writer.put_bools(key, (0..to.unsigned_abs() % 70).map(|i| i % 3 > 0)).ok().map(drop),
        };
        return writer.put(key, changed).ok().map(drop);
    }
    let Value::Array(array) = value else { return writer.put(key, value).ok().map(drop) };
    match array.element() {
        ValueType::String => writer.put_strings(key, array.byte_strings()?).ok().map(drop),
        ValueType::Bool => writer
            .put_bools(key, array.scalars()?.map(|value| matches!(value, Value::Bool(true))))
            .ok()
            .map(drop),
        ValueType::F32 => writer
            .put_f32s(key, array.scalars()?.map(|value| value.as_float().unwrap_or_default() as f32))
            .ok()
            .map(drop),
        _ => writer
            .put_i32s(key, array.scalars()?.map(|value| value.as_integer().unwrap_or_default() as i32))
            .ok()
            .map(drop),
    }
}

fn header_seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> = (0..3).map(|kind| vec![kind, 0]).collect();
    for kind in 0..3 {
        for at in 0..24 {
            // One key or tensor as another kind, with a number at an edge.
            seeds.push(vec![kind, 1, at * 5, at, 1, at]);
        }
    }
    seeds
}

/// A checkpoint's settings, index and tokenizer changed: it is refused with a reason, or what is written loads.
pub const CHECKPOINT: Target = Target {
    name: "checkpoint",
    about: "config.json, index and tokenizer.json of a checkpoint changed: refused, or what was written loads",
    run: checkpoint,
    seeds: checkpoint_seeds,
    words: &[],
    max_len: 256,
    memory: (96 << 20, 65_536),
    millis: (4000, 1000),
};

/// A folder of this process, and what its settings were.
struct Base {
    folder: tempfile::TempDir,
    files: [(&'static str, serde_json::Value); 3],
}

static BASE: LazyLock<Base> = LazyLock::new(|| {
    let folder = folder();
    muser_convert::synth::write(folder.path(), &geometry(), SynthKind::Nvfp4, 1, &mut |_, _| {})
        .expect("written");
    let read = |name: &'static str| {
        let text = std::fs::read_to_string(folder.path().join(name)).expect("written before");
        (name, serde_json::from_str(&text).expect("JSON"))
    };
    let files = ["config.json", "model.safetensors.index.json", "tokenizer.json"].map(read);
    Base { folder, files }
});

fn checkpoint(data: &[u8]) {
    let mut input = Input::new(data);
    let folder = BASE.folder.path();
    let which = input.below(4);
    for (index, (name, value)) in BASE.files.iter().enumerate() {
        let mut value = value.clone();
        if which == index || which == 3 {
            input.change(&mut value);
        }
        write(&folder.join(name), value.to_string().as_bytes());
    }
    let out = folder.join("out.gguf");
    match convert(folder, &out, &Choices { force: true, ..Choices::default() }, &mut |_, _| {}) {
        Ok(summary) => {
            let file = GgufFile::open(&out).expect("what was written is a file");
            assert_eq!(file.tensors().len(), summary.tensors);
            Model::from_gguf(Arc::new(file)).map(drop).expect("what was written loads");
        }
        Err(error) => assert!(!error.to_string().is_empty() && error.to_string().len() < 64 << 10),
    }
    assert!(!folder.join("out.gguf.part").exists(), "nothing is left half done");
}

fn write(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).expect("a folder in memory");
}

fn checkpoint_seeds() -> Vec<Vec<u8>> {
    let mut seeds = vec![vec![3]];
    for which in 0..3 {
        for at in 0..8 {
            seeds.push(vec![which, 1, 1, at, 3, 1, at, 3, 2, at]);
        }
    }
    seeds
}
