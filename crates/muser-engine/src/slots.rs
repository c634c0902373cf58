//! The sequences that have memory: those that run, each in its slot, and those whose prefix is on its way.

use smallvec::SmallVec;

use crate::sequence::Sequence;

/// Most sequences that fetch at a time.
const MOST_FETCHING: usize = 16;

/// As many places as sequences may run together, the slots, and behind them those of sequences that fetch: they hold memory and
/// no slot, so that whoever can compute does.
pub(crate) struct Slots {
    places: Vec<Option<Sequence>>,
    slots: usize,
}

impl Slots {
    pub(crate) fn new(parallel: usize) -> Self {
        let places = (0..parallel + MOST_FETCHING).map(|_| None).collect();
        Self { places, slots: parallel }
    }

    /// Places in all.
    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.places.iter().all(Option::is_none)
    }

    /// The first slot that nobody has.
    pub(crate) fn free(&self) -> Option<usize> {
        self.places[..self.slots].iter().position(Option::is_none)
    }

    /// The first place that nobody has of those without a slot.
    pub(crate) fn free_aside(&self) -> Option<usize> {
        let aside = self.places[self.slots..].iter().position(Option::is_none)?;
        Some(self.slots + aside)
    }

    /// The first in rank of those that have all they fetched and wait for a slot.
    pub(crate) fn ready(&self) -> Option<usize> {
        let aside = self.iter().filter(|(place, _)| *place >= self.slots);
        let ready = aside.filter(|(_, sequence)| sequence.blocks.kv().is_some());
        ready.map(|(place, sequence)| (sequence.rank(), place)).min().map(|(_, place)| place)
    }

    /// Sequences without a slot.
    pub(crate) fn aside(&self) -> usize {
        self.places[self.slots..].iter().flatten().count()
    }

    pub(crate) fn get(&self, slot: usize) -> Option<&Sequence> {
        self.places.get(slot)?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, slot: usize) -> Option<&mut Sequence> {
        self.places.get_mut(slot)?.as_mut()
    }

    pub(crate) fn take(&mut self, slot: usize) -> Option<Sequence> {
        self.places.get_mut(slot)?.take()
    }

    pub(crate) fn put(&mut self, slot: usize, sequence: Sequence) {
        self.places[slot] = Some(sequence);
    }

    /// All that have memory.
    pub(crate) fn running(&self) -> impl Iterator<Item = &Sequence> {
        self.places.iter().flatten()
    }

    pub(crate) fn running_mut(&mut self) -> impl Iterator<Item = &mut Sequence> {
        self.places.iter_mut().flatten()
    }

    /// All that have memory, with their places.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, &Sequence)> {
        self.places.iter().enumerate().filter_map(|(place, sequence)| Some((place, sequence.as_ref()?)))
    }

    /// Those in slots.
    pub(crate) fn seated(&self) -> impl Iterator<Item = (usize, &Sequence)> {
        self.iter().take_while(|(place, _)| *place < self.slots)
    }

    /// Slots of the sequences in them, first in rank first.
    pub(crate) fn by_rank(&self) -> SmallVec<[usize; 16]> {
        let mut slots: SmallVec<[_; 16]> = self.seated().map(|(slot, s)| (s.rank(), slot)).collect();
        slots.sort_unstable();
        slots.into_iter().map(|(_, slot)| slot).collect()
    }
}
