//! The sequences that run, each in its slot.

use smallvec::SmallVec;

use crate::sequence::Sequence;

/// As many places as sequences may run together.
pub(crate) struct Slots(Vec<Option<Sequence>>);

impl Slots {
    pub(crate) fn new(parallel: usize) -> Self {
        Self((0..parallel).map(|_| None).collect())
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    /// The first slot that nobody has.
    pub(crate) fn free(&self) -> Option<usize> {
        self.0.iter().position(Option::is_none)
    }

    pub(crate) fn get(&self, slot: usize) -> Option<&Sequence> {
        self.0.get(slot)?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, slot: usize) -> Option<&mut Sequence> {
        self.0.get_mut(slot)?.as_mut()
    }

    pub(crate) fn take(&mut self, slot: usize) -> Option<Sequence> {
        self.0.get_mut(slot)?.take()
    }

    pub(crate) fn put(&mut self, slot: usize, sequence: Sequence) {
        self.0[slot] = Some(sequence);
    }

    pub(crate) fn running(&self) -> impl Iterator<Item = &Sequence> {
        self.0.iter().flatten()
    }

    pub(crate) fn running_mut(&mut self) -> impl Iterator<Item = &mut Sequence> {
        self.0.iter_mut().flatten()
    }

    /// With their slots.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, &Sequence)> {
        self.0.iter().enumerate().filter_map(|(slot, sequence)| Some((slot, sequence.as_ref()?)))
    }

    /// Slots of the running sequences, first in rank first.
    pub(crate) fn by_rank(&self) -> SmallVec<[usize; 16]> {
        let mut slots: SmallVec<[_; 16]> = self.iter().map(|(slot, s)| (s.rank(), slot)).collect();
        slots.sort_unstable();
        slots.into_iter().map(|(_, slot)| slot).collect()
    }
}
