//! Which tokens each slot held last, for clients that save and restore slots by their number.
//!
//! The engine has no such slots: any free place computes any request, and prefixes are found by content. A number is
//! only a name for the last request that was sent under it. A request without one takes the slot whose tokens it
//! continues, else an empty one, else the one that was used longest ago.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::owner::Owner;

/// The slots. What they hold is gone with the process.
#[derive(Debug, Default)]
pub struct SlotBook {
    book: Mutex<Book>,
}

#[derive(Debug, Default)]
struct Book {
    slots: Vec<Held>,
    uses: u64,
}

#[derive(Debug, Default, Clone)]
struct Held {
    owner: Owner,
    ids: Vec<u32>,
    used: u64,
}

impl SlotBook {
    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what a request of one of `count` slots has come to. `wanted` is the slot that it named.
    pub fn note(&self, owner: Owner, wanted: Option<usize>, count: usize, ids: Vec<u32>) {
        let mut book = self.lock();
        book.slots.resize(count.max(1), Held::default());
        book.uses += 1;
        let slot =
            wanted.filter(|slot| *slot < book.slots.len()).unwrap_or_else(|| book.fitting(owner, &ids));
        book.slots[slot] = Held { owner, ids, used: book.uses };
    }

    /// The tokens of an owner's slot; none if somebody else has used it last, or nobody.
    pub fn ids(&self, owner: Owner, slot: usize) -> Vec<u32> {
        let book = self.lock();
        let held = book.slots.get(slot).filter(|held| held.owner == owner);
        held.map(|held| held.ids.clone()).unwrap_or_default()
    }

    /// Forgets the tokens of an owner's slot and says how many they were.
    pub fn erase(&self, owner: Owner, slot: usize) -> usize {
        let mut book = self.lock();
        let held = book.slots.get_mut(slot).filter(|held| held.owner == owner);
        held.map_or(0, |held| std::mem::take(&mut held.ids).len())
    }

    /// Is a slot's last request this owner's?
    pub fn belongs_to(&self, owner: Owner, slot: usize) -> bool {
        self.lock().slots.get(slot).is_some_and(|held| held.owner == owner)
    }
}

impl Book {
    fn fitting(&self, owner: Owner, ids: &[u32]) -> usize {
        let common = |held: &Held| held.ids.iter().zip(ids).take_while(|(a, b)| a == b).count();
        let continued = self
            .slots
            .iter()
            .enumerate()
            .filter(|(_, held)| held.owner == owner && common(held) * 2 > held.ids.len());
        let continued = continued.max_by_key(|(_, held)| common(held)).map(|(slot, _)| slot);
        let empty = || self.slots.iter().position(|held| held.ids.is_empty());
        let oldest =
            || self.slots.iter().enumerate().min_by_key(|(_, held)| held.used).map_or(0, |(slot, _)| slot);
        continued.or_else(empty).unwrap_or_else(oldest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Owner = Owner::EVERYBODY;

    #[test]
    fn a_slot_is_its_last_users_alone() {
        let (book, b) = (SlotBook::default(), Owner::of_key(&[7; 32]));
        book.note(A, Some(0), 2, vec![1, 2, 3]);
        assert_eq!((book.ids(b, 0), book.erase(b, 0)), (vec![], 0));
        assert!(book.belongs_to(A, 0) && !book.belongs_to(b, 0));
        // A request that continues another owner's tokens does not find that slot by them.
        book.note(b, None, 2, vec![1, 2, 3, 4]);
        assert_eq!((book.ids(A, 0), book.ids(b, 1)), (vec![1, 2, 3], vec![1, 2, 3, 4]));
    }

    #[test]
    fn a_request_finds_the_slot_that_it_continues() {
        let book = SlotBook::default();
        book.note(A, None, 2, vec![1, 2, 3]);
        book.note(A, None, 2, vec![7, 8, 9]);
        assert_eq!((book.ids(A, 0), book.ids(A, 1)), (vec![1, 2, 3], vec![7, 8, 9]));
        book.note(A, None, 2, vec![1, 2, 3, 4]);
        assert_eq!(book.ids(A, 0), [1, 2, 3, 4]);
        // Nothing in common: the one that was used longest ago.
        book.note(A, None, 2, vec![5]);
        assert_eq!((book.ids(A, 0), book.ids(A, 1)), (vec![1, 2, 3, 4], vec![5]));
        book.note(A, Some(0), 2, vec![6]);
        assert_eq!(book.ids(A, 0), [6]);
        assert_eq!((book.erase(A, 0), book.ids(A, 0)), (1, vec![]));
        assert_eq!((book.erase(A, 9), book.ids(A, 9)), (0, vec![]));
    }
}
