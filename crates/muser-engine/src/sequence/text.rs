//! What a sequence has read and written: token ids, what each position is known by, and the pictures among them.

use muser_kv::PositionKey;

use crate::{ContextPolicy, Prompt, ShiftPlan, image::PlacedImage};

/// Tokens and what each position is known by stay parallel: only the verbs here change either.
pub(crate) struct Text {
    tokens: Vec<u32>,
    units: Vec<PositionKey>,
    images: Vec<PlacedImage>,
    shift: Option<ShiftPlan>,
}

impl Text {
    /// A prompt, with room for `capacity` positions in all: decoding allocates nothing.
    pub(crate) fn new(prompt: &Prompt, policy: &ContextPolicy, capacity: usize, hidden: usize) -> Self {
        let mut tokens = Vec::with_capacity(capacity);
        tokens.extend_from_slice(&prompt.tokens);
        let mut units = Vec::with_capacity(capacity);
        units.extend(prompt.tokens.iter().map(|&id| PositionKey::token(id)));
        for image in &prompt.images {
            let positions = image.positions(hidden);
            if let Some(start) = image.at.checked_sub(1)
                && let Some(token) = units[start].as_token()
            {
                units[start] = PositionKey::media_start(&image.digest, token);
            }
            for (row, unit) in units[image.at..][..positions].iter_mut().enumerate() {
                *unit = PositionKey::media(&image.digest, row as u32);
            }
        }
        let shift = match policy {
            ContextPolicy::Error => None,
            ContextPolicy::Shift(plan) => Some(plan.clone()),
        };
        let images = prompt.images.iter().map(|image| PlacedImage::of(image, hidden)).collect();
        Self { tokens, units, images, shift }
    }

    /// Positions.
    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Positions that it may have without an allocation.
    pub(crate) fn capacity(&self) -> usize {
        self.tokens.capacity()
    }

    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub(crate) fn units(&self) -> &[PositionKey] {
        &self.units
    }

    pub(crate) fn images(&self) -> &[PlacedImage] {
        &self.images
    }

    pub(crate) fn images_mut(&mut self) -> &mut [PlacedImage] {
        &mut self.images
    }

    /// Appends a token.
    pub(crate) fn push(&mut self, id: u32) {
        self.tokens.push(id);
        self.units.push(PositionKey::token(id));
    }

    /// Drops what the request lets go, to make room within `limit` positions; returns how many positions went. `None` when
    /// nothing may go or it would not make room for one more token.
    pub(crate) fn shift(&mut self, limit: usize) -> Option<usize> {
        let plan = self.shift.as_mut()?;
        let range = plan.leaving(self.tokens.len(), limit)?;
        let dropped = range.len();
        self.tokens.drain(range.clone());
        self.units.drain(range.clone());
        // No turn boundary cuts an image; that was checked at the door.
        self.images.retain(|image| !range.contains(&image.at));
        for image in &mut self.images {
            if image.at >= range.end {
                image.at -= dropped;
            }
        }
        Some(dropped)
    }
}
