//! The identity of what an engine computes, taken from the loaded artifacts and from nothing else.

use std::fs::File;

use muser_backend::{ExecutorInfo, KvType, kv_layout};
use muser_gguf::{GgufFile, Value};
use muser_kv::BLOCK_LEN;
use muser_model::{Draft, Model};
use muser_pack::{
    Digest, DraftModel, FileStamp, FingerprintCache, Geometry, Identity, LayerKind, Positions,
    Representation, TensorBytes, WeightsRoot,
};

/// An identity could not be taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IdentityError {
    /// A figure does not fit the format.
    #[error("{what} is {found}, a pack's identity holds at most {most}")]
    TooLarge {
        /// Which figure.
        what: &'static str,
        /// Its value.
        found: usize,
        /// The most.
        most: u64,
    },
}

/// The files that a model's weights are mapped from, and what they were like when this was made.
#[derive(Debug)]
pub struct WeightsFiles {
    files: Vec<File>,
    stamp: FileStamp,
}

impl WeightsFiles {
    /// The files of `file`; `None` for bytes that are in none.
    pub fn of(file: &GgufFile) -> Option<Self> {
        let shards = (0..file.shard_count()).map(|shard| file.shard_file(shard)?.try_clone().ok());
        let files: Vec<File> = shards.collect::<Option<_>>()?;
        let stamp = FileStamp::of(&files.iter().collect::<Vec<_>>()).ok()?;
        Some(Self { files, stamp })
    }

    /// Has nobody written to them since? What is computed from changed weights belongs to no identity.
    pub fn are_unchanged(&self) -> bool {
        let now = FileStamp::of(&self.files.iter().collect::<Vec<_>>());
        now.is_ok_and(|now| now.has_the_content_of(&self.stamp))
    }
}

/// The root over a file's tensors: from the cache if the file has not changed since it was hashed, else computed with
/// `threads` threads. `hashing` hears of the bytes about to be hashed.
pub fn weights_root(
    file: &GgufFile,
    cache: Option<&FingerprintCache>,
    threads: usize,
    hashing: impl FnOnce(u64),
) -> WeightsRoot {
    // Of what is mapped, not of what has its name by now. A model inside the executable has no file and is small.
    let stamp = WeightsFiles::of(file).map(|files| files.stamp);
    let known = cache.zip(stamp.as_ref()).and_then(|(cache, stamp)| cache.get(stamp));
    if let Some(root) = known {
        return root;
    }
    let tensors: Vec<TensorBytes<'_>> = file
        .tensors()
        .iter()
        .map(|tensor| TensorBytes {
            name: &tensor.name,
            kind: tensor.ty as u32,
            dims: &tensor.dims,
            bytes: file.tensor_data(tensor),
        })
        .collect();
    hashing(tensors.iter().map(|tensor| tensor.bytes.len() as u64).sum());
    let root = WeightsRoot::of(&tensors, threads);
    // What changed while it was hashed has no root.
    let after = WeightsFiles::of(file).map(|files| files.stamp);
    if let Some((cache, stamp)) = cache.zip(stamp)
        && after.as_ref() == Some(&stamp)
        && let Err(error) = cache.put(&stamp, root)
    {
        tracing::warn!("the model's fingerprint is not remembered: {error}");
    }
    root
}

/// The identity of what an executor with these facts computes with this model, whose tensors have the root `weights`; and
/// with this draft, if it has one.
pub fn identity_of(
    model: &Model,
    weights: WeightsRoot,
    draft: Option<(&Draft, WeightsRoot)>,
    info: &ExecutorInfo,
) -> Result<Identity, IdentityError> {
    let geometry = &model.geometry;
    let small = |what: &'static str, value: usize| {
        u32::try_from(value).map_err(|_| IdentityError::TooLarge {
            what,
            found: value,
            most: u64::from(u32::MAX),
        })
    };
    let bits = |value: f32| u64::from(value.to_bits());
    // Of K, or of V.
    let row_bytes = geometry.kv_heads * info.kv_type.head_bytes(geometry.head_dim) / 2;
    let draft = draft
        .map(|(draft, root)| {
            Ok(DraftModel {
                weights: digest("draft", &[&root.0, &metadata(&draft.file, |_| true)]),
                layers: small("draft layers", draft.layers.len())?,
                window: small("draft window", info.draft.map_or(0, |draft| draft.window))?,
            })
        })
        .transpose()?;
    Ok(Identity {
        weights: weights.0,
        architecture: metadata(&model.file, |key| {
            !key.starts_with("tokenizer.") && !key.starts_with("general.")
        }),
        // How activations are rounded is part of the route, so of the representation.
        quantisation: "per tensor, in the weights' root".into(),
        adapters: Vec::new(),
        tokenizer: digest(
            "tokenizer",
            &[&metadata(&model.file, |key| key.starts_with("tokenizer.") && !is_template(key))],
        ),
        template: digest("template", &[&metadata(&model.file, is_template)]),
        positions: Positions {
            rotary_base_bits: f64::from(geometry.rope_theta).to_bits(),
            pairing: "interleaved".into(),
            scaling: "none".into(),
            rotating: geometry.sliding.clone(),
            origin: 0,
        },
        geometry: Geometry {
            layers: geometry
                .sliding
                .iter()
                .map(|&sliding| if sliding { LayerKind::Sliding } else { LayerKind::Full })
                .collect(),
            window: small("window", geometry.window)?,
            kv_heads: small("KV heads", geometry.kv_heads)?,
            head_dim: small("head size", geometry.head_dim)?,
            block_len: BLOCK_LEN as u32,
        },
        scalars: vec![
            ("rms_eps".into(), bits(geometry.rms_eps)),
            ("post_norm_eps".into(), bits(geometry.post_norm_eps)),
            ("logit_scale".into(), bits(geometry.logit_scale)),
            ("softcap".into(), geometry.softcap.map_or(u64::MAX, bits)),
        ],
        context_policy: "a shifted context is another prefix".into(),
        media: None,
        draft,
        representation: Representation {
            route: info.route.clone(),
            kv_type: info.kv_type.name().into(),
            layout: layout(info.backend, info.kv_type),
            row_bytes: small("row", row_bytes)?,
            full_block_bytes: small("full block", info.full_block_bytes)?,
            sliding_block_bytes: small("sliding block", info.sliding_block_bytes)?,
        },
    })
}

/// The facts of an executor as they are without its draft, for an identity of the model's state alone: of a sliding block the
/// draft's layers are the last, and no bit of the others depends on them.
pub fn without_draft(info: &ExecutorInfo, model: &Model) -> ExecutorInfo {
    let geometry = &model.geometry;
    let Some(digits) = info.kv_type.digits().filter(|_| info.draft.is_some()) else { return info.clone() };
    let head = kv_layout::HeadLayout { dim: geometry.head_dim, digits };
    let layers = geometry.sliding.iter().filter(|sliding| **sliding).count();
    let target = info.route.rsplit_once('+').map_or(&*info.route, |(target, _)| target);
    ExecutorInfo {
        route: target.into(),
        sliding_block_bytes: layers * geometry.kv_heads * head.bytes(),
        draft: None,
        ..info.clone()
    }
}

/// How blocks lie in memory once exported: in digits alike on all backends, so that one reads what another wrote.
fn layout(backend: &str, kv_type: KvType) -> String {
    match kv_type.digits() {
        Some(_) => kv_layout::NAME.into(),
        None => format!("{backend} blocks as the route exports them"),
    }
}

fn is_template(key: &str) -> bool {
    key.starts_with("tokenizer.chat_template")
}

/// The metadata entries with these keys, in the order of the keys, each with its length.
fn metadata(file: &GgufFile, wanted: impl Fn(&str) -> bool) -> Vec<u8> {
    let mut entries: Vec<_> = file.metadata().filter(|(key, _)| wanted(key)).collect();
    entries.sort_by_key(|(key, _)| *key);
    let mut bytes = Vec::new();
    for (key, value) in entries {
        put(&mut bytes, key.as_bytes());
        put(&mut bytes, value.value_type().name().as_bytes());
        match value {
            Value::String(text) => put(&mut bytes, text.as_bytes()),
            Value::Array(array) => {
                put(&mut bytes, array.element().name().as_bytes());
                put(&mut bytes, &(array.len() as u64).to_le_bytes());
                // Vocabularies are megabytes; their digest stands for them.
                put(&mut bytes, &digest("array", &[array.raw_bytes()]));
            }
            Value::Bool(value) => put(&mut bytes, &[u8::from(value)]),
            other => match (other.as_integer(), other.as_float()) {
                (Some(integer), _) => put(&mut bytes, &integer.to_le_bytes()),
                (_, float) => put(&mut bytes, &float.unwrap_or(0.0).to_bits().to_le_bytes()),
            },
        }
    }
    bytes
}

fn put(bytes: &mut Vec<u8>, part: &[u8]) {
    bytes.extend_from_slice(&(part.len() as u64).to_le_bytes());
    bytes.extend_from_slice(part);
}

fn digest(what: &str, parts: &[&[u8]]) -> Digest {
    let mut hasher = blake3::Hasher::new_derive_key("muser model identity v1");
    let mut bytes = Vec::new();
    put(&mut bytes, what.as_bytes());
    hasher.update(&bytes);
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
    }
    *hasher.finalize().as_bytes()
}

#[cfg(all(test, unix))]
mod tests {
    use std::path::Path;

    use muser_pack::KeyRing;

    use super::*;

    fn open(path: &Path) -> GgufFile {
        GgufFile::open(path).expect("a model")
    }

    fn info(route: &str, draft_layers: usize, model: &Model) -> ExecutorInfo {
        let geometry = &model.geometry;
        let digits = KvType::Int16.digits().expect("digits");
        let layer = geometry.kv_heads * kv_layout::HeadLayout { dim: geometry.head_dim, digits }.bytes();
        let layers = |sliding: bool| geometry.sliding.iter().filter(|other| **other == sliding).count();
        ExecutorInfo {
            backend: "cpu",
            device: String::new(),
            route: route.into(),
            kv_type: KvType::Int16,
            full_block_bytes: layers(false) * layer,
            sliding_block_bytes: (layers(true) + draft_layers) * layer,
            max_rows: 512,
            vocab: geometry.vocab,
            hidden: geometry.hidden,
            draft: (draft_layers > 0).then_some(muser_backend::DraftInfo { max_proposals: 15, window: 2048 }),
            kv_room: None,
            prompt_rows: 0,
        }
    }

    #[test]
    fn what_was_computed_is_the_same_by_any_route_and_the_target_the_same_with_any_draft() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/muse-tiny-Q4_K_M.gguf");
        let model = Model::load(path).expect("it loads");
        let of =
            |info: &ExecutorInfo| identity_of(&model, WeightsRoot([7; 32]), None, info).expect("an identity");
        let plain = of(&info("exact-1/kv16", 0, &model));
        let other = of(&info("exact-1/kv16-prefill8", 0, &model));
        assert_eq!(plain.semantic(), other.semantic());
        assert_ne!(plain.digest(), other.digest());
        assert_eq!(plain.first_difference(&other), Some("numeric route"));
        // With a draft the state is another; what of it is the model's is not.
        for route in ["exact-1/kv16", "exact-1/kv16-prefill8"] {
            let drafting = info(&format!("{route}+dflash-1-abc"), 5, &model);
            assert_ne!(of(&drafting).digest(), of(&info(route, 0, &model)).digest());
            let target = of(&without_draft(&drafting, &model));
            assert_eq!(target, of(&info(route, 0, &model)));
        }
    }

    #[test]
    fn blocks_in_digits_are_every_backends_others_their_own() {
        for kv in [KvType::Int16, KvType::Int8] {
            assert_eq!(layout("cpu", kv), layout("cuda", kv));
        }
        assert_ne!(layout("cpu", KvType::Int16), layout("cpu", KvType::F32));
        assert_ne!(layout("scalar", KvType::F32), layout("cpu", KvType::F32));
    }

    #[test]
    fn a_root_is_that_of_the_mapped_file_whatever_has_its_name_by_now() {
        let folder = tempfile::tempdir().expect("a folder");
        let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/muse-tiny-Q4_K_M.gguf");
        let (path, next) = (folder.path().join("model.gguf"), folder.path().join("next"));
        std::fs::copy(&bundled, &path).expect("copied");
        // Another revision with the same header: one weight differs.
        let mut bytes = std::fs::read(&bundled).expect("read");
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        std::fs::write(&next, bytes).expect("written");
        let cache = FingerprintCache::new(folder.path().join("cache"), &KeyRing::generate().expect("random"));
        let loaded = open(&path);
        let files = WeightsFiles::of(&loaded).expect("it is a file");
        // Between loading and hashing somebody pulls the other one.
        std::fs::rename(&next, &path).expect("renamed");
        let first = weights_root(&loaded, Some(&cache), 1, |_| {});
        assert_eq!(first, weights_root(&open(&bundled), None, 1, |_| {}));
        assert!(files.are_unchanged(), "another file has its name; the mapped one is as it was");
        let second = weights_root(&open(&path), Some(&cache), 1, |_| {});
        assert_ne!(first, second, "the other revision was taken for the first");
        // The root of each is remembered as its own.
        assert_eq!(weights_root(&loaded, Some(&cache), 1, |_| panic!("hashed again")), first);
        assert_eq!(weights_root(&open(&path), Some(&cache), 1, |_| panic!("hashed again")), second);
        // Written to in place: what is computed from now on belongs to nobody.
        let now = open(&path);
        let files = WeightsFiles::of(&now).expect("it is a file");
        std::thread::sleep(std::time::Duration::from_millis(20));
        let mut file = std::fs::OpenOptions::new().write(true).open(&path).expect("opened");
        std::io::Seek::seek(&mut file, std::io::SeekFrom::End(-1)).expect("seek");
        std::io::Write::write_all(&mut file, &[7]).expect("written");
        assert!(!files.are_unchanged());
    }
}
