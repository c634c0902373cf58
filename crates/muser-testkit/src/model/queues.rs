//! Queues and cells of other crates: a list or a value behind a lock. That theirs are right is their authors' business.

use std::collections::VecDeque;
use std::task::Waker;

use super::Mutex;

/// crossbeam's of this name.
#[derive(Debug)]
pub struct ArrayQueue<T>(Mutex<VecDeque<T>>, usize);

impl<T> ArrayQueue<T> {
    /// See there.
    pub fn new(capacity: usize) -> Self {
        Self(Mutex::new(VecDeque::new()), capacity)
    }

    /// See there.
    pub fn capacity(&self) -> usize {
        self.1
    }

    /// See there.
    pub fn len(&self) -> usize {
        self.0.lock().expect("no panic").len()
    }

    /// See there.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// See there.
    ///
    /// # Errors
    /// The value, if the queue is full.
    pub fn push(&self, value: T) -> Result<(), T> {
        let mut list = self.0.lock().expect("no panic");
        if list.len() == self.1 {
            return Err(value);
        }
        list.push_back(value);
        Ok(())
    }

    /// See there.
    pub fn pop(&self) -> Option<T> {
        self.0.lock().expect("no panic").pop_front()
    }
}

/// crossbeam's of this name.
#[derive(Debug)]
pub struct SegQueue<T>(ArrayQueue<T>);

impl<T> SegQueue<T> {
    /// See there.
    #[expect(clippy::new_without_default, reason = "as the one it stands for is made here")]
    pub fn new() -> Self {
        Self(ArrayQueue::new(usize::MAX))
    }

    /// See there.
    pub fn push(&self, value: T) {
        let _ = self.0.push(value);
    }

    /// See there.
    pub fn pop(&self) -> Option<T> {
        self.0.pop()
    }

    /// See there.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// That of futures.
#[derive(Debug)]
pub struct AtomicWaker(Mutex<Option<Waker>>);

impl AtomicWaker {
    /// See there.
    #[expect(clippy::new_without_default, reason = "as the one it stands for is made here")]
    pub fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// See there.
    pub fn register(&self, waker: &Waker) {
        *self.0.lock().expect("no panic") = Some(waker.clone());
    }

    /// See there.
    pub fn wake(&self) {
        let waker = self.0.lock().expect("no panic").take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// The standard library's of this name.
#[derive(Debug)]
pub struct OnceLock<T>(Mutex<Option<T>>);

impl<T: Copy> OnceLock<T> {
    /// See there.
    #[expect(clippy::new_without_default, reason = "as the one it stands for is made here")]
    pub fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// See there.
    ///
    /// # Errors
    /// The value, if there is one already.
    pub fn set(&self, value: T) -> Result<(), T> {
        let mut cell = self.0.lock().expect("no panic");
        if cell.is_some() {
            return Err(value);
        }
        *cell = Some(value);
        Ok(())
    }

    /// See there; a copy.
    pub fn get(&self) -> Option<Box<T>> {
        self.0.lock().expect("no panic").map(Box::new)
    }
}
