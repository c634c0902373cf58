//! What stands at one position of a prefix: a token or one row of an image.

/// Identity of a position's input. Equal units at equal positions after equal prefixes have equal KV.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PositionKey(u64);

impl PositionKey {
    const MEDIA: u64 = 1 << 63;

    /// A token.
    pub fn token(id: u32) -> Self {
        Self(u64::from(id))
    }

    /// Row `row` of the image with this digest: 63 bits of BLAKE3 over both. An image has many rows, so that a block
    /// with image rows is bound by many times 63 bits.
    pub fn media(digest: &[u8; 32], row: u32) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("muser kv media unit v1");
        hasher.update(digest).update(&row.to_le_bytes());
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
        Self(u64::from_le_bytes(bytes) | Self::MEDIA)
    }

    /// The token that opens the image with this digest: with it an image of one row is bound by twice 63 bits.
    pub fn media_start(digest: &[u8; 32], token: u32) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("muser kv media start v1");
        hasher.update(digest).update(&token.to_le_bytes());
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
        Self(u64::from_le_bytes(bytes) | Self::MEDIA)
    }

    /// The token id, if it is a token.
    pub fn as_token(self) -> Option<u32> {
        u32::try_from(self.0).ok()
    }

    /// The unit with these bytes, as [`PositionKey::to_le_bytes`] gave them.
    pub fn from_le_bytes(bytes: [u8; 8]) -> Self {
        Self(u64::from_le_bytes(bytes))
    }

    /// The bytes that enter a block's hash.
    pub fn to_le_bytes(self) -> [u8; 8] {
        self.0.to_le_bytes()
    }
}
