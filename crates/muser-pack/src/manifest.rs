//! What a pack is: the state at one cut of one prefix, as a list of segments.
//!
//! The manifest is the payload of an object like any other, so every field of it is authenticated and, in a sealed store,
//! encrypted. The tokens of the prefix are in here and nowhere else.

use muser_kv::{BLOCK_LEN, KvGroup, PositionKey};

use crate::encode::{Reader, Writer};
use crate::keys::TenantKeys;
use crate::{Identity, PackId, Refusal, SegmentId};

/// Most positions of a pack.
pub const MAX_POSITIONS: u32 = 1 << 20;

const DOMAIN: &str = "muser pack manifest";
/// Chain key, full segment, flag, sliding segment.
const BLOCK_BYTES: usize = 32 + 32 + 1;

/// Place in the hash chain over blocks: stands for tenant, identity and every token up to the end of a block.
pub type ChainKey = [u8; 32];

/// One block of a pack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) key: ChainKey,
    pub(crate) full: SegmentId,
    /// Not every sliding block was kept: a resume point needs only those that its window reaches.
    pub(crate) sliding: Option<SegmentId>,
}

/// A decoded manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Manifest {
    pub(crate) tenant: [u8; 16],
    pub(crate) identity: Identity,
    pub(crate) created_unix_s: u64,
    /// Chain key before the first block.
    pub(crate) root: ChainKey,
    /// What stands at each position; as many as the cut.
    pub(crate) units: Vec<[u8; 8]>,
    /// Blocks from position 0; the last one may be unfinished.
    pub(crate) blocks: Vec<Block>,
}

impl Manifest {
    pub(crate) fn encode(&self) -> Vec<u8> {
        self.encode_with_time(self.created_unix_s)
    }

    fn encode_with_time(&self, created_unix_s: u64) -> Vec<u8> {
        let mut writer = Writer::for_domain(DOMAIN);
        writer.u16(crate::object::VERSION);
        writer.u16(0);
        writer.fixed(&self.tenant);
        writer.bytes(&self.identity.encode());
        writer.u64(created_unix_s);
        writer.fixed(&self.root);
        writer.u32(self.units.len() as u32);
        for unit in &self.units {
            writer.fixed(unit);
        }
        writer.u32(self.blocks.len() as u32);
        for block in &self.blocks {
            writer.fixed(&block.key);
            writer.fixed(&block.full.0);
            writer.u8(u8::from(block.sliding.is_some()));
            if let Some(sliding) = &block.sliding {
                writer.fixed(&sliding.0);
            }
        }
        writer.into_bytes()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Refusal> {
        let malformed = |field, found: u64| Refusal::Malformed { field, found };
        let mut of = Reader::new(bytes);
        if of.string("manifest domain")? != DOMAIN {
            return Err(malformed("manifest domain", 0));
        }
        let version = of.u16()?;
        if version != crate::object::VERSION {
            return Err(Refusal::Version { expected: crate::object::VERSION, found: version });
        }
        let flags = of.u16()?;
        if flags != 0 {
            return Err(malformed("manifest flags", u64::from(flags)));
        }
        let tenant = of.array()?;
        let identity = Identity::decode(of.bytes()?)?;
        if identity.geometry.block_len as usize != BLOCK_LEN {
            return Err(malformed("block length", u64::from(identity.geometry.block_len)));
        }
        let created_unix_s = of.u64()?;
        let root = of.array()?;
        let cut = of.count("positions", MAX_POSITIONS, 8)?;
        if cut == 0 {
            return Err(malformed("positions", 0));
        }
        let mut units = Vec::with_capacity(cut);
        for _ in 0..cut {
            units.push(of.array()?);
        }
        let count = of.count("blocks", MAX_POSITIONS / BLOCK_LEN as u32, BLOCK_BYTES)?;
        if count != cut.div_ceil(BLOCK_LEN) {
            return Err(malformed("blocks", count as u64));
        }
        let mut blocks = Vec::with_capacity(count);
        for _ in 0..count {
            let (key, full) = (of.array()?, SegmentId(of.array()?));
            let sliding = match of.u8()? {
                0 => None,
                1 => Some(SegmentId(of.array()?)),
                found => return Err(malformed("sliding flag", u64::from(found))),
            };
            blocks.push(Block { key, full, sliding });
        }
        of.finish()?;
        Ok(Self { tenant, identity, created_unix_s, root, units, blocks })
    }

    /// Names the pack by everything but the time, so that publishing it again finds it.
    pub(crate) fn id(&self, keys: &TenantKeys) -> PackId {
        PackId(*blake3::keyed_hash(&keys.pack, &self.encode_with_time(0)).as_bytes())
    }

    pub(crate) fn cut(&self) -> usize {
        self.units.len()
    }

    /// Positions of block `index`.
    pub(crate) fn positions(&self, index: usize) -> usize {
        (self.cut() - index * BLOCK_LEN).min(BLOCK_LEN)
    }

    /// All segments: group, block index, name.
    pub(crate) fn segments(&self) -> impl Iterator<Item = (KvGroup, usize, SegmentId)> + '_ {
        self.blocks.iter().enumerate().flat_map(|(index, block)| {
            let sliding = block.sliding.map(|id| (KvGroup::Sliding, index, id));
            std::iter::once((KvGroup::Full, index, block.full)).chain(sliding)
        })
    }
}

/// Chain key before the first block of a tenant's prefixes under an identity.
pub(crate) fn chain_root(prefix_key: &[u8; 32], identity: &[u8; 32]) -> ChainKey {
    *blake3::keyed_hash(prefix_key, identity).as_bytes()
}

/// Chain keys of all blocks, an unfinished last block included.
pub(crate) fn chain(prefix_key: &[u8; 32], root: ChainKey, units: &[PositionKey]) -> Vec<ChainKey> {
    let mut previous = root;
    let mut bytes = [0; BLOCK_LEN * 8];
    units
        .chunks(BLOCK_LEN)
        .map(|block| {
            for (to, unit) in bytes.chunks_exact_mut(8).zip(block) {
                to.copy_from_slice(&unit.to_le_bytes());
            }
            let mut hasher = blake3::Hasher::new_keyed(prefix_key);
            // Unfinished blocks cannot pass for whole ones: the hash is over fewer bytes.
            hasher.update(&previous).update(&bytes[..block.len() * 8]);
            previous = *hasher.finalize().as_bytes();
            previous
        })
        .collect()
}
