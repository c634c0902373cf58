//! The complete set of inputs that give the bytes of a block their meaning.
//!
//! Equal identities and equal tokens mean equal bytes; whatever could change a byte must therefore be in here. Two
//! digests are taken: the *semantic* one over what was computed, and the *representation* one over that plus how it was
//! computed and stored (numeric route, KV type, layout). Lookups use the representation, since only equal bits may be
//! mixed; a consumer that accepts several asks once for each.
//!
//! The digests are over one canonical encoding (see [`Identity::encode`]): each field with its tag and its length, so
//! that no two different identities encode equally. The table of layers is in [`Geometry::layers`] and nowhere else.

use muser_kv::BLOCK_LEN;

use crate::Refusal;
use crate::encode::{Reader, Writer};

/// Digest of an identity.
pub type Digest = [u8; 32];

/// What a layer's K and V planes are: part of the one table from which everything about planes is derived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Attends to every earlier position; its rows are in segments of the full group.
    Full,
    /// Attends to a window; its rows are in segments of the sliding group.
    Sliding,
}

/// Sizes of the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Each layer from 0.
    pub layers: Vec<LayerKind>,
    /// Keys that a sliding layer sees, the query's own included.
    pub window: u32,
    /// K and V heads of a layer.
    pub kv_heads: u32,
    /// Values in a head.
    pub head_dim: u32,
    /// Positions in a block.
    pub block_len: u32,
}

/// How positions enter K.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Positions {
    /// Bit pattern of the rotary base (f64).
    pub rotary_base_bits: u64,
    /// Which values are rotated together, such as `neox` or `interleaved`.
    pub pairing: String,
    /// Scaling of positions, `none` where there is none.
    pub scaling: String,
    /// Which layers rotate.
    pub rotating: Vec<bool>,
    /// Position of the first token.
    pub origin: u64,
}

/// An adapter merged into the weights at run time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapter {
    /// Digest of its tensors.
    pub digest: Digest,
    /// Bit pattern of its scale (f32).
    pub scale_bits: u32,
}

/// How images become rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Media {
    /// Digest of the projector's tensors and configuration.
    pub projector: Digest,
    /// Digest of the preprocessing's parameters.
    pub preprocessing: Digest,
}

/// The draft model whose K and V lie beside those of the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftModel {
    /// Digest of its tensors and configuration.
    pub weights: Digest,
    /// Layers whose planes are stored.
    pub layers: u32,
    /// Positions back that it looks at.
    pub window: u32,
}

/// How the numbers were computed and stored: what may differ between two packs of the same prefix of the same model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Representation {
    /// Numeric route: backend arithmetic, kernel revision, KV type. Equal routes give equal bits.
    pub route: String,
    /// Storage type of K and V, such as `f16`.
    pub kv_type: String,
    /// Order of the values in a block; a new name for every change.
    pub layout: String,
    /// Bytes of one row of one plane; chunks hold whole ones.
    pub row_bytes: u32,
    /// Bytes of a block of the full group, all its layers.
    pub full_block_bytes: u32,
    /// Bytes of a block of the sliding group, draft planes included.
    pub sliding_block_bytes: u32,
}

/// Everything that gives stored bytes their meaning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Root over the digests of all tensors (see [`crate::WeightsRoot`]), not a file's hash.
    pub weights: Digest,
    /// Architecture's configuration: names and values of everything that the forward pass reads.
    pub architecture: Vec<u8>,
    /// Weight type of each class of tensors, and the precision of activations.
    pub quantisation: String,
    /// Adapters in the order of their application.
    pub adapters: Vec<Adapter>,
    /// Digest of vocabulary, merges, pre-split rules and special tokens.
    pub tokenizer: Digest,
    /// Digest of the chat template's bytes.
    pub template: Digest,
    /// How positions enter K.
    pub positions: Positions,
    /// Sizes of the cache and the table of layers.
    pub geometry: Geometry,
    /// Scalars of the arithmetic with their exact bits: QK scale, soft-cap, epsilons.
    pub scalars: Vec<(String, u64)>,
    /// What happens at the end of the context, such as `refuse`.
    pub context_policy: String,
    /// Image path, `None` for text only.
    pub media: Option<Media>,
    /// Draft model whose planes are in the sliding blocks.
    pub draft: Option<DraftModel>,
    /// How the numbers were computed and stored.
    pub representation: Representation,
}

/// Version of the encoding below; it enters both digests.
const VERSION: u16 = 1;
const LIMIT_ITEMS: u32 = 4096;

impl Identity {
    /// The identity of a made-up model, for tests and examples of stores: two full layers, two sliding ones with a window
    /// of 512; blocks of two and three pages.
    pub fn example() -> Self {
        Self {
            weights: [1; 32],
            architecture: b"layers=4".to_vec(),
            quantisation: "Q4_K_M; activations Q8".into(),
            adapters: Vec::new(),
            tokenizer: [2; 32],
            template: [3; 32],
            positions: Positions {
                rotary_base_bits: 10_000_f64.to_bits(),
                pairing: "neox".into(),
                scaling: "none".into(),
                rotating: vec![false, true, true, false],
                origin: 0,
            },
            geometry: Geometry {
                layers: vec![LayerKind::Full, LayerKind::Sliding, LayerKind::Sliding, LayerKind::Full],
                window: 512,
                kv_heads: 1,
                head_dim: 8,
                block_len: BLOCK_LEN as u32,
            },
            scalars: vec![("epsilon".into(), 1e-6_f64.to_bits())],
            context_policy: "refuse".into(),
            media: None,
            draft: None,
            representation: Representation {
                route: "scalar-1".into(),
                kv_type: "f16".into(),
                layout: "planes-1".into(),
                row_bytes: 16,
                full_block_bytes: 8_192,
                sliding_block_bytes: 10_240,
            },
        }
    }

    /// The same with layers and blocks of the full-size model: 39 sliding layers with a window of 2,048 and 13 full ones.
    pub fn example_full_size() -> Self {
        let mut identity = Self::example();
        let kind = |i| if i % 4 == 3 { LayerKind::Full } else { LayerKind::Sliding };
        identity.geometry = Geometry {
            layers: (0..52).map(kind).collect(),
            window: 2048,
            kv_heads: 2,
            head_dim: 128,
            block_len: 256,
        };
        identity.positions.rotating = vec![true; 52];
        identity.representation.row_bytes = 512;
        identity.representation.full_block_bytes = 13 * 256 * 1024;
        identity.representation.sliding_block_bytes = 39 * 256 * 1024;
        identity
    }

    /// The canonical bytes: semantic part, then representation.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::for_domain("muser pack identity");
        writer.u16(VERSION);
        writer.bytes(&self.encode_semantic());
        writer.bytes(&self.encode_representation());
        writer.into_bytes()
    }

    /// Reads what [`Identity::encode`] wrote and nothing else.
    pub fn decode(bytes: &[u8]) -> Result<Self, Refusal> {
        let mut reader = Reader::new(bytes);
        expect(reader.string("identity domain")? == "muser pack identity", "identity domain")?;
        let version = reader.u16()?;
        if version != VERSION {
            return Err(Refusal::Version { expected: VERSION, found: version });
        }
        let semantic = reader.bytes()?;
        let representation = reader.bytes()?;
        reader.finish()?;
        let identity = decode_parts(semantic, representation)?;
        expect(identity.encode() == bytes, "identity encoding")?;
        Ok(identity)
    }

    /// Digest of what was computed, however it is stored.
    pub fn semantic(&self) -> Digest {
        blake3::derive_key("muser pack v1 semantic identity", &self.encode_semantic())
    }

    /// Digest of what was computed and how it is stored: what a lookup is keyed with.
    pub fn digest(&self) -> Digest {
        blake3::derive_key("muser pack v1 representation identity", &self.encode())
    }

    /// The first field in which `other` differs, in the order of the encoding.
    pub fn first_difference(&self, other: &Self) -> Option<&'static str> {
        let (a, b) = (self, other);
        let (ra, rb) = (&a.representation, &b.representation);
        let fields: [(&'static str, bool); 18] = [
            ("weights", a.weights == b.weights),
            ("architecture", a.architecture == b.architecture),
            ("quantisation", a.quantisation == b.quantisation),
            ("adapters", a.adapters == b.adapters),
            ("tokenizer", a.tokenizer == b.tokenizer),
            ("chat template", a.template == b.template),
            ("positions", a.positions == b.positions),
            ("geometry", a.geometry == b.geometry),
            ("scalars", a.scalars == b.scalars),
            ("context policy", a.context_policy == b.context_policy),
            ("media", a.media == b.media),
            ("draft model", a.draft == b.draft),
            ("numeric route", ra.route == rb.route),
            ("KV type", ra.kv_type == rb.kv_type),
            ("layout", ra.layout == rb.layout),
            ("row bytes", ra.row_bytes == rb.row_bytes),
            ("full block bytes", ra.full_block_bytes == rb.full_block_bytes),
            ("sliding block bytes", ra.sliding_block_bytes == rb.sliding_block_bytes),
        ];
        fields.into_iter().find(|(_, same)| !same).map(|(name, _)| name)
    }

    fn encode_semantic(&self) -> Vec<u8> {
        let mut writer = Writer::for_domain("semantic");
        writer.fixed(&self.weights);
        writer.bytes(&self.architecture);
        writer.string(&self.quantisation);
        writer.u32(self.adapters.len() as u32);
        for adapter in &self.adapters {
            writer.fixed(&adapter.digest);
            writer.u32(adapter.scale_bits);
        }
        writer.fixed(&self.tokenizer);
        writer.fixed(&self.template);
        writer.u64(self.positions.rotary_base_bits);
        writer.string(&self.positions.pairing);
        writer.string(&self.positions.scaling);
        writer.u32(self.positions.rotating.len() as u32);
        for &rotates in &self.positions.rotating {
            writer.u8(u8::from(rotates));
        }
        writer.u64(self.positions.origin);
        writer.u32(self.geometry.layers.len() as u32);
        for &layer in &self.geometry.layers {
            writer.u8(u8::from(layer == LayerKind::Sliding));
        }
        for value in
            [self.geometry.window, self.geometry.kv_heads, self.geometry.head_dim, self.geometry.block_len]
        {
            writer.u32(value);
        }
        writer.u32(self.scalars.len() as u32);
        for (name, bits) in &self.scalars {
            writer.string(name);
            writer.u64(*bits);
        }
        writer.string(&self.context_policy);
        writer.u8(u8::from(self.media.is_some()));
        if let Some(media) = &self.media {
            writer.fixed(&media.projector);
            writer.fixed(&media.preprocessing);
        }
        writer.u8(u8::from(self.draft.is_some()));
        if let Some(draft) = &self.draft {
            writer.fixed(&draft.weights);
            writer.u32(draft.layers);
            writer.u32(draft.window);
        }
        writer.into_bytes()
    }

    fn encode_representation(&self) -> Vec<u8> {
        let representation = &self.representation;
        let mut writer = Writer::for_domain("representation");
        writer.string(&representation.route);
        writer.string(&representation.kv_type);
        writer.string(&representation.layout);
        writer.u32(representation.row_bytes);
        writer.u32(representation.full_block_bytes);
        writer.u32(representation.sliding_block_bytes);
        writer.into_bytes()
    }
}

fn decode_parts(semantic: &[u8], representation: &[u8]) -> Result<Identity, Refusal> {
    let mut of = Reader::new(representation);
    expect(of.string("representation domain")? == "representation", "representation domain")?;
    let representation = Representation {
        route: of.string("numeric route")?.to_owned(),
        kv_type: of.string("KV type")?.to_owned(),
        layout: of.string("layout")?.to_owned(),
        row_bytes: of.u32()?,
        full_block_bytes: of.u32()?,
        sliding_block_bytes: of.u32()?,
    };
    of.finish()?;
    let mut of = Reader::new(semantic);
    expect(of.string("semantic domain")? == "semantic", "semantic domain")?;
    let weights = of.array()?;
    let architecture = of.bytes()?.to_vec();
    let quantisation = of.string("quantisation")?.to_owned();
    let mut adapters = Vec::new();
    for _ in 0..of.count("adapters", LIMIT_ITEMS, 36)? {
        adapters.push(Adapter { digest: of.array()?, scale_bits: of.u32()? });
    }
    let (tokenizer, template) = (of.array()?, of.array()?);
    let rotary_base_bits = of.u64()?;
    let pairing = of.string("pairing")?.to_owned();
    let scaling = of.string("scaling")?.to_owned();
    let mut rotating = Vec::new();
    for _ in 0..of.count("rotating layers", LIMIT_ITEMS, 1)? {
        rotating.push(flag(&mut of, "rotating layer")?);
    }
    let positions = Positions { rotary_base_bits, pairing, scaling, rotating, origin: of.u64()? };
    let mut layers = Vec::new();
    for _ in 0..of.count("layers", LIMIT_ITEMS, 1)? {
        layers.push(if flag(&mut of, "layer kind")? { LayerKind::Sliding } else { LayerKind::Full });
    }
    let geometry = Geometry {
        layers,
        window: of.u32()?,
        kv_heads: of.u32()?,
        head_dim: of.u32()?,
        block_len: of.u32()?,
    };
    let mut scalars = Vec::new();
    for _ in 0..of.count("scalars", LIMIT_ITEMS, 12)? {
        scalars.push((of.string("scalar name")?.to_owned(), of.u64()?));
    }
    let context_policy = of.string("context policy")?.to_owned();
    let media = if flag(&mut of, "media")? {
        Some(Media { projector: of.array()?, preprocessing: of.array()? })
    } else {
        None
    };
    let draft = if flag(&mut of, "draft")? {
        Some(DraftModel { weights: of.array()?, layers: of.u32()?, window: of.u32()? })
    } else {
        None
    };
    of.finish()?;
    Ok(Identity {
        weights,
        architecture,
        quantisation,
        adapters,
        tokenizer,
        template,
        positions,
        geometry,
        scalars,
        context_policy,
        media,
        draft,
        representation,
    })
}

fn flag(of: &mut Reader<'_>, field: &'static str) -> Result<bool, Refusal> {
    match of.u8()? {
        0 => Ok(false),
        1 => Ok(true),
        found => Err(Refusal::Malformed { field, found: u64::from(found) }),
    }
}

fn expect(good: bool, field: &'static str) -> Result<(), Refusal> {
    if good { Ok(()) } else { Err(Refusal::Malformed { field, found: 0 }) }
}
