//! The one container: every stored object is an authenticated header and, aligned behind it, the payload in chunks.
//!
//! ```text
//!   0  8  magic "MUSRPACK"            44  4  reserved, 0
//!   8  2  version, 1                  48 16  key id
//!  10  1  kind                        64 32  name
//!  11  1  sealing: 1 AES-256-GCM, 2 plain with AES-256-GMAC
//!  12  4  header bytes (n × 4,096)    96 32  salt
//!  16  4  key epoch                  128  …  a tag of 16 bytes for each chunk
//!  20  4  chunk bytes (n × 4,096)      …  …  zeros
//!  24  8  payload bytes              end-32  authentication of everything before it (keyed BLAKE3)
//!  32  4  chunks
//!  36  4  bytes of a row             then the payload, chunk after chunk, nothing between, nothing behind
//!  40  4  positions
//! ```
//!
//! The header's code covers every tag and the fixed fields, a tag covers its chunk and its number under a key of this very
//! object. So each byte of payload is authenticated once on its way in, chunk by chunk: BLAKE3 over the whole would find
//! nothing that the tags do not, and is left to `verify`. A chunk is read into scratch memory that stays in a core's
//! second-level cache and is decrypted from there into its place, which costs one pass over slow memory and not two.

use aws_lc_rs::aead;
use aws_lc_rs::rand::{SecureRandom as _, SystemRandom};

use crate::keys::{EpochKeys, KeyRing};
use crate::kind::Kind;
use crate::store::ReadAt;
use crate::{Area, ObjectName, PackError, Refusal};

/// First bytes of every object.
pub const MAGIC: [u8; 8] = *b"MUSRPACK";
/// Version of the container and of the manifest.
pub const VERSION: u16 = 1;
/// Alignment of chunks on disk.
pub const ALIGNMENT: usize = 4096;
/// Most plaintext bytes of a chunk.
pub const MAX_CHUNK_BYTES: u32 = 4 << 20;
/// Most bytes of a manifest or of a record.
pub const MAX_MANIFEST_BYTES: u64 = 64 << 20;
/// Most bytes of a segment.
pub const MAX_SEGMENT_BYTES: u64 = 1 << 30;
/// Chunks are about so large: they are read, checked and decrypted while they are in a core's second-level cache.
pub(crate) const USUAL_CHUNK_BYTES: u32 = 256 << 10;

const FIXED: usize = 128;
const MAC: usize = 32;
const TAG: usize = 16;
/// Values of the sealing byte. 0 was plain with hashes instead of tags, before the format was used by anybody.
const ENCRYPTED: u8 = 1;
const PLAIN: u8 = 2;

impl Kind {
    fn area(self) -> Area {
        match self {
            Self::Manifest => Area::Packs,
            Self::Full | Self::Sliding => Area::Segments,
            Self::Record => Area::Records,
        }
    }

    fn max_payload(self) -> u64 {
        match self {
            Self::Manifest | Self::Record => MAX_MANIFEST_BYTES,
            Self::Full | Self::Sliding => MAX_SEGMENT_BYTES,
        }
    }
}

/// What a writer says about a payload.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spec {
    pub(crate) kind: Kind,
    /// Bytes of a row, which no chunk splits; 1 where there are none.
    pub(crate) row_bytes: u32,
    /// Positions; 0 where there are none.
    pub(crate) positions: u32,
    /// Bytes of a chunk.
    pub(crate) chunk_bytes: u32,
}

impl Spec {
    /// For a payload without rows.
    pub(crate) fn plain(kind: Kind) -> Self {
        Self { kind, row_bytes: 1, positions: 0, chunk_bytes: USUAL_CHUNK_BYTES }
    }
}

/// The largest chunk up to `most` that is a whole number of rows and of pages.
pub(crate) fn chunk_bytes(row_bytes: u32, most: u32) -> u32 {
    let (mut a, mut b) = (u64::from(row_bytes.max(1)), ALIGNMENT as u64);
    let product = a * b;
    while b > 0 {
        (a, b) = (b, a % b);
    }
    let unit = product / a;
    let most = u64::from(most.min(MAX_CHUNK_BYTES));
    // A row so long that no whole number of them fits the limit cannot be stored; the writer refuses it then.
    u32::try_from((most / unit).max(1) * unit).unwrap_or(u32::MAX)
}

/// A fixed header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) spec: Spec,
    pub(crate) encrypted: bool,
    pub(crate) epoch: u32,
    pub(crate) payload_bytes: u64,
    pub(crate) chunks: u32,
    pub(crate) key_id: [u8; 16],
    pub(crate) name: [u8; 32],
    salt: [u8; 32],
}

impl PartialEq for Spec {
    fn eq(&self, other: &Self) -> bool {
        (self.kind, self.row_bytes, self.positions, self.chunk_bytes)
            == (other.kind, other.row_bytes, other.positions, other.chunk_bytes)
    }
}

impl Eq for Spec {}

impl Header {
    pub(crate) fn header_bytes(&self) -> usize {
        (FIXED + self.chunks as usize * TAG + MAC).next_multiple_of(ALIGNMENT)
    }

    pub(crate) fn chunk_range(&self, index: u32) -> (u64, usize) {
        let start = u64::from(index) * u64::from(self.spec.chunk_bytes);
        let len = (self.payload_bytes - start).min(u64::from(self.spec.chunk_bytes));
        (start, len as usize)
    }

    fn encode(&self) -> [u8; FIXED] {
        let mut out = [0; FIXED];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC);
        put(8, &VERSION.to_le_bytes());
        put(10, &[self.spec.kind as u8, if self.encrypted { ENCRYPTED } else { PLAIN }]);
        put(12, &(self.header_bytes() as u32).to_le_bytes());
        put(16, &self.epoch.to_le_bytes());
        put(20, &self.spec.chunk_bytes.to_le_bytes());
        put(24, &self.payload_bytes.to_le_bytes());
        put(32, &self.chunks.to_le_bytes());
        put(36, &self.spec.row_bytes.to_le_bytes());
        put(40, &self.spec.positions.to_le_bytes());
        put(48, &self.key_id);
        put(64, &self.name);
        put(96, &self.salt);
        out
    }

    /// Reads the fixed fields and checks every one that can be checked without a key.
    fn decode(bytes: &[u8; FIXED]) -> Result<Self, Refusal> {
        fn array<const N: usize>(bytes: &[u8; FIXED], at: usize) -> [u8; N] {
            let mut out = [0; N];
            out.copy_from_slice(&bytes[at..at + N]);
            out
        }
        let u32_at = |at| u32::from_le_bytes(array(bytes, at));
        if bytes[..8] != MAGIC {
            return Err(Refusal::NotAPack);
        }
        let version = u16::from_le_bytes(array(bytes, 8));
        if version != VERSION {
            return Err(Refusal::Version { expected: VERSION, found: version });
        }
        let malformed = |field, found| Err(Refusal::Malformed { field, found });
        let kind = match bytes[10] {
            1 => Kind::Manifest,
            2 => Kind::Full,
            3 => Kind::Sliding,
            4 => Kind::Record,
            found => return malformed("kind", u64::from(found)),
        };
        let encrypted = match bytes[11] {
            ENCRYPTED => true,
            PLAIN => false,
            found => return malformed("sealing", u64::from(found)),
        };
        let header = Self {
            spec: Spec { kind, row_bytes: u32_at(36), positions: u32_at(40), chunk_bytes: u32_at(20) },
            encrypted,
            epoch: u32_at(16),
            payload_bytes: u64::from_le_bytes(array(bytes, 24)),
            chunks: u32_at(32),
            key_id: array(bytes, 48),
            name: array(bytes, 64),
            salt: array(bytes, 96),
        };
        if u32_at(44) != 0 {
            return malformed("reserved field", u64::from(u32_at(44)));
        }
        header.check()?;
        let header_bytes = u32_at(12);
        if header_bytes as usize != header.header_bytes() {
            return malformed("header bytes", u64::from(header_bytes));
        }
        Ok(header)
    }

    /// The limits, before anything is allocated by these numbers.
    fn check(&self) -> Result<(), Refusal> {
        let spec = &self.spec;
        let malformed = |field, found: u64| Err(Refusal::Malformed { field, found });
        if spec.chunk_bytes > MAX_CHUNK_BYTES {
            let found = u64::from(spec.chunk_bytes);
            return Err(Refusal::OverLimit {
                field: "chunk bytes",
                limit: u64::from(MAX_CHUNK_BYTES),
                found,
            });
        }
        if spec.chunk_bytes == 0 || !(spec.chunk_bytes as usize).is_multiple_of(ALIGNMENT) {
            return malformed("chunk bytes", u64::from(spec.chunk_bytes));
        }
        let limit = spec.kind.max_payload();
        if self.payload_bytes > limit {
            return Err(Refusal::OverLimit { field: "payload bytes", limit, found: self.payload_bytes });
        }
        if self.payload_bytes == 0 {
            return malformed("payload bytes", 0);
        }
        if u64::from(self.chunks) != self.payload_bytes.div_ceil(u64::from(spec.chunk_bytes)) {
            return malformed("chunks", u64::from(self.chunks));
        }
        let rows_are_whole = spec.row_bytes > 0
            && spec.chunk_bytes.is_multiple_of(spec.row_bytes)
            && self.payload_bytes.is_multiple_of(u64::from(spec.row_bytes));
        if !rows_are_whole {
            return malformed("row bytes (a chunk would split a row)", u64::from(spec.row_bytes));
        }
        Ok(())
    }
}

/// An object ready to be stored: header, then body.
pub(crate) struct SealedObject {
    pub(crate) header: Vec<u8>,
    pub(crate) body: Vec<u8>,
}

impl SealedObject {
    /// Bytes on disk.
    pub(crate) fn bytes(&self) -> u64 {
        (self.header.len() + self.body.len()) as u64
    }

    /// The header's code, which stands for every byte on disk.
    pub(crate) fn storage_digest(&self) -> [u8; 32] {
        let mut mac = [0; MAC];
        mac.copy_from_slice(&self.header[self.header.len() - MAC..]);
        mac
    }
}

/// Seals a payload under the current epoch.
pub(crate) fn seal(
    keys: &KeyRing,
    encrypt: bool,
    spec: Spec,
    name: [u8; 32],
    payload: &[u8],
) -> Result<SealedObject, PackError> {
    let epoch = keys.current_epoch();
    let object = ObjectName { area: spec.kind.area(), id: name };
    let epoch_keys = keys.epoch(epoch).map_err(|reason| PackError::refused(object, reason))?;
    let mut salt = [0; 32];
    SystemRandom::new().fill(&mut salt).map_err(|_| PackError::Random)?;
    let header = Header {
        spec,
        encrypted: encrypt,
        epoch,
        payload_bytes: payload.len() as u64,
        chunks: u32::try_from(payload.len().div_ceil(spec.chunk_bytes.max(1) as usize)).unwrap_or(u32::MAX),
        key_id: *keys.key_id(),
        name,
        salt,
    };
    header.check().map_err(|reason| PackError::refused(object, reason))?;
    let fixed = header.encode();
    let mut bytes = vec![0; header.header_bytes()];
    bytes[..FIXED].copy_from_slice(&fixed);
    let entries = bytes[FIXED..].chunks_exact_mut(TAG);
    let mut body = Vec::with_capacity(payload.len());
    let cipher = Cipher::new(epoch_keys, &header, &fixed);
    for (index, (plain, entry)) in payload.chunks(spec.chunk_bytes as usize).zip(entries).enumerate() {
        let at = body.len();
        body.extend_from_slice(plain);
        entry.copy_from_slice(&cipher.seal(index as u32, &mut body[at..])?);
    }
    let end = bytes.len() - MAC;
    let mac = blake3::keyed_hash(epoch_keys.authentication(), &bytes[..end]);
    bytes[end..].copy_from_slice(mac.as_bytes());
    Ok(SealedObject { header: bytes, body })
}

/// Keyed digest of a chunk of plaintext.
pub(crate) fn leaf(keys: &KeyRing, plain: &[u8]) -> [u8; 32] {
    *blake3::keyed_hash(keys.chunk_key(), plain).as_bytes()
}

/// Name of a segment: keyed hash over what it is and the digests of its chunks.
pub(crate) fn content_id(keys: &KeyRing, content_key: &[u8; 32], spec: &Spec, payload: &[u8]) -> [u8; 32] {
    let mut writer = crate::encode::Writer::for_domain("muser pack segment");
    writer.u8(spec.kind as u8);
    writer.u32(spec.row_bytes);
    writer.u32(spec.positions);
    writer.u32(spec.chunk_bytes);
    writer.u64(payload.len() as u64);
    for chunk in payload.chunks(spec.chunk_bytes as usize) {
        writer.fixed(&leaf(keys, chunk));
    }
    *blake3::keyed_hash(content_key, &writer.into_bytes()).as_bytes()
}

/// Writes key id and header's code into an object, for fuzzers, and returns its name.
pub(crate) fn mend(keys: &KeyRing, bytes: &mut [u8]) -> [u8; 32] {
    let mut name = [0; 32];
    let Some(fixed) = bytes.get_mut(..FIXED) else { return name };
    name.copy_from_slice(&fixed[64..96]);
    fixed[48..64].copy_from_slice(keys.key_id());
    let epoch = u32::from_le_bytes([fixed[16], fixed[17], fixed[18], fixed[19]]);
    let len = u32::from_le_bytes([fixed[12], fixed[13], fixed[14], fixed[15]]) as usize;
    if let (Ok(epoch), Some(header)) = (keys.epoch(epoch), bytes.get_mut(..len))
        && let Some(covered) = len.checked_sub(MAC)
    {
        let code = blake3::keyed_hash(epoch.authentication(), &header[..covered]);
        header[covered..].copy_from_slice(code.as_bytes());
    }
    name
}

/// An object whose header was believed. Every byte of content is checked as it is read.
pub(crate) struct OpenedObject {
    pub(crate) header: Header,
    /// The header's code.
    pub(crate) storage_digest: [u8; 32],
    object: ObjectName,
    file: Box<dyn ReadAt>,
    /// The chunks' tags.
    tags: Vec<u8>,
    cipher: Cipher,
}

impl OpenedObject {
    /// Checks everything about an object except its content. With `sealed_only` a plain object is refused, however
    /// authentic: otherwise whoever can write files could talk a store out of encryption.
    pub(crate) fn open(
        keys: &KeyRing,
        sealed_only: bool,
        object: ObjectName,
        file: Box<dyn ReadAt>,
    ) -> Result<Self, PackError> {
        let refuse = |reason| PackError::refused(object, reason);
        let found = file.len()?;
        let truncated = |expected| refuse(Refusal::Truncated { expected, found });
        let mut fixed = [0; FIXED];
        if found < ALIGNMENT as u64 {
            // Say "not a pack" of a foreign file and "truncated" of a torn one.
            let there = (found as usize).min(MAGIC.len());
            file.read_at(0, &mut fixed[..there])?;
            let known = fixed[..there] == MAGIC[..there];
            return Err(if known { truncated(ALIGNMENT as u64) } else { refuse(Refusal::NotAPack) });
        }
        // Most headers are one page.
        let mut bytes = vec![0; ALIGNMENT];
        file.read_at(0, &mut bytes)?;
        fixed.copy_from_slice(&bytes[..FIXED]);
        let header = Header::decode(&fixed).map_err(refuse)?;
        if header.key_id != *keys.key_id() {
            let (expected, found) = (keys.id(), crate::name::hex(&header.key_id));
            return Err(refuse(Refusal::ForeignKey { expected, found }));
        }
        let epoch_keys = keys.epoch(header.epoch).map_err(refuse)?;
        let expected = header.header_bytes() as u64 + header.payload_bytes;
        if found < expected {
            return Err(truncated(expected));
        }
        if found > expected {
            return Err(refuse(Refusal::Trailing { expected, found }));
        }
        bytes.resize(header.header_bytes(), 0);
        if bytes.len() > ALIGNMENT {
            file.read_at(ALIGNMENT as u64, &mut bytes[ALIGNMENT..])?;
        }
        let (covered, mac) = bytes.split_at(bytes.len() - MAC);
        let expected = blake3::keyed_hash(epoch_keys.authentication(), covered);
        // `blake3::Hash` compares in constant time.
        let mut storage_digest = [0; MAC];
        storage_digest.copy_from_slice(mac);
        if expected != blake3::Hash::from_bytes(storage_digest) {
            return Err(refuse(Refusal::Header));
        }
        let table_end = FIXED + header.chunks as usize * TAG;
        if let Some(&found) = covered[table_end..].iter().find(|&&byte| byte != 0) {
            return Err(refuse(Refusal::Malformed { field: "padding", found: u64::from(found) }));
        }
        if header.name != object.id || header.spec.kind.area() != object.area {
            return Err(refuse(Refusal::Swapped));
        }
        if sealed_only && !header.encrypted {
            return Err(refuse(Refusal::NotEncrypted));
        }
        let cipher = Cipher::new(epoch_keys, &header, &fixed);
        let tags = covered[FIXED..table_end].to_vec();
        Ok(Self { header, storage_digest, object, file, tags, cipher })
    }

    /// Reads a chunk as it lies on disk into `scratch`, which is made as long as the chunk, and looks at nothing.
    pub(crate) fn read_stored(&self, index: u32, scratch: &mut Vec<u8>) -> Result<(), PackError> {
        let (start, len) = self.header.chunk_range(index);
        scratch.resize(len, 0);
        self.file.read_at(self.header.header_bytes() as u64 + start, scratch)
    }

    /// Checks what [`OpenedObject::read_stored`] has read and writes its plaintext into `out`, which is as long. On failure
    /// `out` holds zeros.
    pub(crate) fn open_stored(&self, index: u32, stored: &[u8], out: &mut [u8]) -> Result<(), PackError> {
        let tag = &self.tags[index as usize * TAG..][..TAG];
        if stored.len() == out.len() && self.cipher.open(index, tag, stored, out) {
            return Ok(());
        }
        out.fill(0);
        Err(PackError::refused(self.object, Refusal::Chunk { index }))
    }

    /// Bytes on disk.
    pub(crate) fn bytes(&self) -> u64 {
        self.header.header_bytes() as u64 + self.header.payload_bytes
    }

    /// Reads the whole payload, which is at most the limit of its kind.
    pub(crate) fn read_all(&self) -> Result<Vec<u8>, PackError> {
        let mut payload = vec![0; self.header.payload_bytes as usize];
        let mut scratch = Vec::new();
        let chunks = payload.chunks_mut(self.header.spec.chunk_bytes as usize);
        for (index, chunk) in chunks.enumerate() {
            self.read_stored(index as u32, &mut scratch)?;
            self.open_stored(index as u32, &scratch, chunk)?;
        }
        Ok(payload)
    }
}

/// Seals and opens chunks: encrypted ones with AES-256-GCM, plain ones with the same cipher's authentication alone (GMAC),
/// where the chunk is the associated data and nothing is encrypted.
struct Cipher {
    key: aead::LessSafeKey,
    encrypted: bool,
    /// Digest of the fixed header fields, then room for the chunk's number.
    associated: [u8; 36],
}

impl Cipher {
    fn new(keys: &EpochKeys, header: &Header, fixed: &[u8; FIXED]) -> Self {
        let mut associated = [0; 36];
        associated[..32].copy_from_slice(blake3::hash(fixed).as_bytes());
        let key = keys.data_key(header.spec.kind, &header.name, &header.salt);
        Self { key, encrypted: header.encrypted, associated }
    }

    /// The key is this object's own, so the chunk's number is a nonce that never repeats.
    fn nonce(&self, index: u32) -> aead::Nonce {
        let mut nonce = [0; 12];
        nonce[..4].copy_from_slice(&index.to_le_bytes());
        nonce[4] = if self.encrypted { 0 } else { PLAIN };
        aead::Nonce::assume_unique_for_key(nonce)
    }

    fn associated(&self, index: u32) -> aead::Aad<[u8; 36]> {
        let mut associated = self.associated;
        associated[32..].copy_from_slice(&index.to_le_bytes());
        aead::Aad::from(associated)
    }

    fn seal(&self, index: u32, bytes: &mut [u8]) -> Result<[u8; TAG], PackError> {
        let nonce = self.nonce(index);
        let tag = if self.encrypted {
            self.key.seal_in_place_separate_tag(nonce, self.associated(index), bytes)
        } else {
            self.key.seal_in_place_separate_tag(nonce, aead::Aad::from(&*bytes), &mut [])
        };
        // Only a chunk beyond GCM's 64 GiB can fail.
        let tag = tag.map_err(|_| PackError::Random)?;
        let mut out = [0; TAG];
        out.copy_from_slice(tag.as_ref());
        Ok(out)
    }

    fn open(&self, index: u32, tag: &[u8], stored: &[u8], out: &mut [u8]) -> bool {
        let nonce = self.nonce(index);
        if self.encrypted {
            return self.key.open_separate_gather(nonce, self.associated(index), stored, tag, out).is_ok();
        }
        let good = self.key.open_separate_gather(nonce, aead::Aad::from(stored), &[], tag, &mut []).is_ok();
        if good {
            out.copy_from_slice(stored);
        }
        good
    }
}
