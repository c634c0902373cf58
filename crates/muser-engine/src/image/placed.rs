//! An image in the positions of a sequence.

use std::sync::Arc;

use muser_backend::TowerImage;

use crate::{ImageRows, ImageSource};

/// An image in the positions of a sequence.
#[derive(Clone, Debug)]
pub(crate) struct PlacedImage {
    /// First position.
    pub(crate) at: usize,
    positions: usize,
    pub(crate) digest: [u8; 32],
    /// What its rows are made of; `None` if they came with the request.
    pub(crate) picture: Option<TowerImage>,
    pub(crate) rows: Option<Arc<[f32]>>,
}

impl PlacedImage {
    pub(crate) fn of(image: &ImageRows, hidden: usize) -> Self {
        let (picture, rows) = match &image.source {
            ImageSource::Rows(rows) => (None, Some(Arc::clone(rows))),
            ImageSource::Picture(picture) => (Some(picture.clone()), None),
        };
        Self { at: image.at, positions: image.positions(hidden), digest: image.digest, picture, rows }
    }

    pub(crate) fn end(&self) -> usize {
        self.at + self.positions
    }

    pub(crate) fn fits(&self, rows: &[f32], hidden: usize) -> bool {
        self.positions * hidden == rows.len()
    }

    /// Is it without rows, and is there something left of it to compute?
    pub(crate) fn is_wanted(&self, computed: usize) -> bool {
        self.rows.is_none() && self.end() > computed
    }
}

/// The row of `position`, if it lies in an image.
pub(crate) fn row(images: &[PlacedImage], position: usize) -> Option<&[f32]> {
    let image = images.iter().rfind(|image| image.at <= position && position < image.end())?;
    let rows = image.rows.as_deref()?;
    let width = rows.len() / image.positions;
    rows.get((position - image.at) * width..)?.get(..width)
}

/// Where rows that can be computed now end: at `end`, or before the first of `start..end` that lies in a picture without rows.
pub(crate) fn ready_until(images: &[PlacedImage], start: usize, end: usize) -> usize {
    let missing = images.iter().find(|image| image.is_wanted(start) && image.at < end);
    missing.map_or(end, |image| image.at.max(start))
}
