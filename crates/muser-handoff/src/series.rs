//! What a consumer has of a prefix that it is fetching, whoever gave it.

use std::sync::Arc;

use crate::digest::{SeriesKey, prefix_digest};
use crate::ids::{Digest, Nonce};
use crate::plan::{Plan, Span};
use crate::planes::Planes;
use crate::{RangeSet, Refusal};

/// A prefix on its way: the same from the first request to the last, of whichever nodes. A transfer borrows it and hands it
/// back, with what has come meanwhile, when it ends.
#[derive(Clone, Debug)]
pub struct Series {
    pub(crate) nonce: Nonce,
    pub(crate) identity: Digest,
    pub(crate) draft: Digest,
    pub(crate) tenant: Digest,
    pub(crate) ids: Arc<[u32]>,
    pub(crate) prefix: Digest,
    pub(crate) plan: Arc<Plan>,
    pub(crate) key: SeriesKey,
    pub(crate) own: RangeSet,
    pub(crate) received: RangeSet,
    /// By chunk; zeros of those that have not come.
    pub(crate) digests: Vec<Digest>,
    pub(crate) installed: u32,
}

/// What a consumer wants.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// What must have computed it ([`crate::Hello::identity`] of a node that may give it).
    pub identity: Digest,
    /// The draft whose rows are wanted too; zeros for none.
    pub draft: Digest,
    /// Whose prompt it is, for the nodes; zeros: everybody's.
    pub tenant: Digest,
    /// The ids, as many as the cut has positions.
    pub ids: Arc<[u32]>,
    /// The consumer's planes: with those of its draft exactly if `draft` is not zeros.
    pub planes: Planes,
    /// Cut, stages, window.
    pub span: Span,
}

impl Series {
    /// A prefix of which the blocks that `has` names (by group and index) need not be sent.
    ///
    /// # Errors
    /// If the span is none or does not have as many positions as there are ids.
    pub fn new(
        nonce: Nonce,
        wanted: Wanted,
        has: impl Fn(muser_kv::KvGroup, u32) -> bool,
    ) -> Result<Self, Refusal> {
        let Wanted { identity, draft, tenant, ids, planes, span } = wanted;
        if ids.len() != span.cut as usize {
            return Err(Refusal::Malformed { field: "cut", found: u64::from(span.cut) });
        }
        if planes.has_draft() != (draft != [0; 32]) {
            return Err(Refusal::Malformed { field: "draft", found: 0 });
        }
        let plan = Plan::new(planes, span)?;
        let held = plan.blocks().filter(|&(group, block)| has(group, block));
        let own: RangeSet = held.map(|(group, block)| plan.block(group, block)).collect();
        let prefix = prefix_digest(&ids);
        Ok(Self {
            nonce,
            identity,
            draft,
            tenant,
            prefix,
            key: SeriesKey::new(nonce, &identity, &prefix),
            own,
            received: RangeSet::default(),
            digests: vec![[0; 32]; plan.chunks() as usize],
            installed: 0,
            ids,
            plan: Arc::new(plan),
        })
    }

    /// The chunks.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// The ids.
    pub fn ids(&self) -> &Arc<[u32]> {
        &self.ids
    }

    /// What has come and was believed.
    pub fn received(&self) -> &RangeSet {
        &self.received
    }

    /// The furthest boundary that was installed.
    pub fn installed(&self) -> u32 {
        self.installed
    }

    /// Chunks that were believed but whose bytes are no longer there: they are asked for again.
    pub fn forget(&mut self, chunks: &RangeSet) {
        self.received = self.received.minus(chunks);
    }
}
