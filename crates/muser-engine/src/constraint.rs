//! Token masks: how a grammar or a tool choice narrows what the sampler may take.

use std::time::Duration;

/// One bit per token id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenMask {
    words: Vec<u32>,
    vocab: usize,
}

impl TokenMask {
    /// A mask for `vocab` tokens that allows none.
    pub fn new(vocab: usize) -> Self {
        Self { words: vec![0; vocab.div_ceil(32)], vocab }
    }

    /// Number of tokens it speaks about.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Allows no token.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Allows every token.
    pub fn allow_all(&mut self) {
        self.words.fill(u32::MAX);
        self.trim();
    }

    /// Allows `id`; ids outside the vocabulary are ignored.
    pub fn allow(&mut self, id: u32) {
        if (id as usize) < self.vocab {
            self.words[id as usize / 32] |= 1 << (id % 32);
        }
    }

    /// Forbids `id`.
    pub fn forbid(&mut self, id: u32) {
        if (id as usize) < self.vocab {
            self.words[id as usize / 32] &= !(1 << (id % 32));
        }
    }

    /// Is `id` allowed?
    pub fn allows(&self, id: u32) -> bool {
        (id as usize) < self.vocab && self.words[id as usize / 32] >> (id % 32) & 1 == 1
    }

    /// Copies 32-bit words (bit `i % 32` of word `i / 32` is token `i`); missing words forbid.
    pub fn copy_words(&mut self, words: &[u32]) {
        let n = words.len().min(self.words.len());
        self.words[..n].copy_from_slice(&words[..n]);
        self.words[n..].fill(0);
        self.trim();
    }

    /// The words, 32 tokens each.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Number of allowed tokens.
    pub fn count(&self) -> usize {
        self.words.iter().map(|w| w.count_ones() as usize).sum()
    }

    fn trim(&mut self) {
        let rest = self.vocab % 32;
        if rest != 0
            && let Some(last) = self.words.last_mut()
        {
            *last &= (1 << rest) - 1;
        }
    }
}

/// Narrows what may be sampled, token by token. Lives on the engine's thread.
pub trait Constraint: Send {
    /// Writes the tokens that may come next into `allowed` (which holds none when called) and returns `true`, or
    /// returns `false` when anything may come.
    ///
    /// When the text is complete, allow the stop ids only.
    fn mask(&mut self, allowed: &mut TokenMask) -> bool;

    /// Waits at most so long until [`Self::mask`] answers at once. `false`: it does not yet, and the sequence sits steps out
    /// meanwhile, so that a mask that takes long holds nobody else up. Constraints that make their masks on other threads say
    /// so here; what they allow must not depend on how long it took.
    fn wait(&mut self, most: Duration) -> bool {
        let _ = most;
        true
    }

    /// Takes the sampled token. An error ends the request with [`crate::RequestError::Constraint`].
    fn commit(&mut self, token: u32) -> Result<(), String>;

    /// A copy that goes on from here by itself: with it a draft looks ahead, and then it is dropped. Without one only the
    /// first proposal of a block follows the constraint; the text is the same, fewer proposals are right.
    fn fork(&self) -> Option<Box<dyn Constraint>> {
        None
    }
}
