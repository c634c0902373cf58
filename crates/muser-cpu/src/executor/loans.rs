//! Which blocks are lent: while they are, their bytes are the borrowers'.

use muser_kv::KvGroup;

use crate::sync::{AtomicBool, AtomicUsize, Ordering};

/// Of both groups. Only the store's owner lends; who has borrowed gives back, on any thread.
pub(crate) struct Loans {
    count: AtomicUsize,
    full: Box<[AtomicBool]>,
    sliding: Box<[AtomicBool]>,
}

impl Loans {
    /// Of so many blocks none is lent.
    pub(crate) fn none_of(full: u32, sliding: u32) -> Self {
        let none = |blocks: u32| (0..blocks).map(|_| AtomicBool::new(false)).collect();
        Self { count: AtomicUsize::new(0), full: none(full), sliding: none(sliding) }
    }

    fn of(&self, group: KvGroup) -> &[AtomicBool] {
        match group {
            KvGroup::Full => &self.full,
            KvGroup::Sliding => &self.sliding,
        }
    }

    /// Is any?
    pub(crate) fn any(&self) -> bool {
        // The count is there so that steps, which name many blocks, look at one word.
        self.count.load(Ordering::Acquire) > 0
    }

    /// If not, all that a borrower has written is seen after this.
    pub(crate) fn is_lent(&self, group: KvGroup, block: usize) -> bool {
        self.any() && self.of(group).get(block).is_some_and(|lent| lent.load(Ordering::Acquire))
    }

    /// `false` if there is no such block, or it is lent.
    pub(crate) fn lend(&self, group: KvGroup, block: usize) -> bool {
        let Some(flag) = self.of(group).get(block) else { return false };
        if flag.swap(true, Ordering::AcqRel) {
            return false;
        }
        self.count.fetch_add(1, Ordering::AcqRel);
        true
    }

    /// What was written before is seen by whoever finds the block not lent.
    pub(crate) fn give_back(&self, group: KvGroup, block: usize) {
        if let Some(flag) = self.of(group).get(block) {
            flag.store(false, Ordering::Release);
            self.count.fetch_sub(1, Ordering::Release);
        }
    }
}
