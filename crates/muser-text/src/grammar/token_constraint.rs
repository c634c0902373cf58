//! A constraint for one text, token by token.
//!
//! Usually one matcher does the work. A schema with far length limits has two of them that follow the same text, one of
//! them without those limits: it gives the masks while no limit can be reached by the next token, at a hundredth of the
//! cost (see [`super::far_limits`]).

use std::sync::Arc;

use llguidance::Matcher;

use super::far_limits::Distance;
use super::first_line;
use crate::Tokenizer;
use crate::error::TextError;

/// Follows one text. [`Self::mask`] and [`Self::commit`] take turns.
pub struct TokenConstraint {
    matcher: Matcher,
    relaxed: Option<Relaxed>,
    kind: &'static str,
}

/// The matcher without far limits.
pub(super) struct Relaxed {
    /// The matcher.
    pub(super) matcher: Matcher,
    /// The smallest limit that it lacks, in characters.
    pub(super) limit_chars: usize,
    /// For the bytes of tokens.
    pub(super) tokenizer: Arc<Tokenizer>,
    /// Length of the vocabulary's longest token.
    pub(super) longest_token_bytes: usize,
    /// How long the open string may be so far.
    pub(super) distance: Distance,
}

impl std::fmt::Debug for TokenConstraint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TokenConstraint").field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl TokenConstraint {
    /// A constraint at the start of its text. Both matchers are fresh.
    pub(super) fn new(kind: &'static str, matcher: Matcher, relaxed: Option<Relaxed>) -> Self {
        Self { matcher, relaxed, kind }
    }

    /// The tokens that may come next: bit `i % 32` of word `i / 32` is token `i`. Where the text may end, the token that
    /// ends a turn is among them.
    pub fn mask(&mut self) -> Result<Vec<u32>, TextError> {
        let kind = self.kind;
        let matcher = match &mut self.relaxed {
            Some(relaxed) if relaxed.is_exact() => &mut relaxed.matcher,
            _ => &mut self.matcher,
        };
        let mask = matcher.compute_mask_or_eos().map_err(|error| fault(kind, &error))?;
        Ok(mask.as_slice().to_vec())
    }

    /// Takes the token that was chosen.
    pub fn commit(&mut self, id: u32) -> Result<(), TextError> {
        let kind = self.kind;
        self.matcher.consume_token(id).map_err(|error| fault(kind, &error))?;
        if let Some(relaxed) = &mut self.relaxed {
            relaxed.matcher.consume_token(id).map_err(|error| fault(kind, &error))?;
            relaxed.distance.push(relaxed.tokenizer.token_bytes(id).unwrap_or_default());
        }
        Ok(())
    }

    /// A copy that goes on by itself, soon to be dropped: it shares the lexer's tables.
    pub(super) fn fork(&self) -> TokenConstraint {
        self.copy(Matcher::clone)
    }

    /// A copy for another text, with tables of its own.
    pub(super) fn deep_copy(&self) -> TokenConstraint {
        self.copy(Matcher::deep_clone)
    }

    fn copy(&self, copy: fn(&Matcher) -> Matcher) -> TokenConstraint {
        let relaxed = self.relaxed.as_ref().map(|relaxed| Relaxed {
            matcher: copy(&relaxed.matcher),
            tokenizer: Arc::clone(&relaxed.tokenizer),
            ..*relaxed
        });
        TokenConstraint { matcher: copy(&self.matcher), relaxed, kind: self.kind }
    }

    /// May the text end here?
    pub fn can_end(&mut self) -> bool {
        self.matcher.is_stopped() || self.matcher.is_accepting().unwrap_or(true)
    }

    /// Must the text end here?
    pub fn is_done(&self) -> bool {
        self.matcher.is_stopped()
    }
}

impl Relaxed {
    /// Whether no next token can make a string longer than a limit that this matcher lacks. A character has at least a
    /// byte, written as JSON or not.
    fn is_exact(&self) -> bool {
        self.distance.bytes() + self.longest_token_bytes <= self.limit_chars
    }
}

fn fault(kind: &'static str, error: &anyhow::Error) -> TextError {
    TextError::Grammar { kind, what: first_line(error) }
}
