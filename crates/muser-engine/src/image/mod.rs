//! Pictures of prompts: their rows are made when a step is about to need one, and not before.
//!
//! A prompt names a picture by digest and row count; that is all that the prefix lookup needs, so a prefix found in memory or in
//! a pack costs no tower row. A running sequence whose next rows lie in a picture waits for it, others go on: the tower works in
//! slices after steps, one part in ten of their time ([`Allowance`]). Rows are kept by digest ([`RowCache`]) as long as there
//! is room, and by the sequences that are not past them.

mod cache;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

use muser_backend::{ExecError, TowerImage};

use crate::{
    ImageRows, ImageSource, RequestError, driver::Driver, metrics::Metrics, scheduler::End, step::panic_text,
};
pub(crate) use cache::RowCache;

/// Longest stretch of tower work while nothing else is to be done: new requests and cancelling wait for it.
const ALONE: Duration = Duration::from_millis(20);
/// Of the time of steps, the tower gets one part in so many.
const SHARE: u32 = 10;

/// An image in the positions of a sequence.
#[derive(Clone, Debug)]
pub(crate) struct PlacedImage {
    /// First position.
    pub(crate) at: usize,
    positions: usize,
    digest: [u8; 32],
    /// What its rows are made of; `None` if they came with the request.
    picture: Option<TowerImage>,
    rows: Option<Arc<[f32]>>,
}

impl PlacedImage {
    pub(crate) fn of(image: &ImageRows, hidden: usize) -> Self {
        let (picture, rows) = match &image.source {
            ImageSource::Rows(rows) => (None, Some(Arc::clone(rows))),
            ImageSource::Picture(picture) => (Some(picture.clone()), None),
        };
        Self { at: image.at, positions: image.positions(hidden), digest: image.digest, picture, rows }
    }

    fn end(&self) -> usize {
        self.at + self.positions
    }

    fn fits(&self, rows: &[f32], hidden: usize) -> bool {
        self.positions * hidden == rows.len()
    }

    /// Is it without rows, and is there something left of it to compute?
    fn is_wanted(&self, computed: usize) -> bool {
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

/// Pictures of all sequences: what is kept and what is in work.
pub(crate) struct Images {
    pub(crate) cache: RowCache,
    /// Digest of the picture that the tower has.
    work: Option<[u8; 32]>,
    /// What comes out of it.
    rows: Vec<f32>,
    allowance: Allowance,
}

impl Images {
    pub(crate) fn new(cache_bytes: usize) -> Self {
        Self {
            cache: RowCache::new(cache_bytes),
            work: None,
            rows: Vec::new(),
            allowance: Allowance::default(),
        }
    }

    pub(crate) fn note_step(&mut self, took: Duration) {
        self.allowance.earn(took);
    }
}

/// Time that the tower may still take without making the steps of others more than a tenth longer. A slice takes what it takes;
/// what it takes too much the next steps pay back.
#[derive(Default)]
struct Allowance {
    nanoseconds: i64,
}

impl Allowance {
    /// Nothing is saved up: a slice never takes more than the last step's share at once.
    fn earn(&mut self, step: Duration) {
        let share = (step / SHARE).as_nanos() as i64;
        self.nanoseconds = (self.nanoseconds + share).min(share);
    }

    fn spend(&mut self, took: Duration) {
        self.nanoseconds -= took.as_nanos() as i64;
    }

    fn left(&self) -> Option<Duration> {
        u64::try_from(self.nanoseconds).ok().filter(|left| *left > 0).map(Duration::from_nanos)
    }
}

impl Driver {
    /// Gives sequences the rows they wait for, and the tower some time. `busy`: a step was run in this turn, and will be in the
    /// next. Did anything happen?
    pub(crate) fn work_on_images(&mut self, busy: bool) -> bool {
        let found = self.take_from_cache();
        let Some((picture, digest)) = self.next_picture() else {
            if self.images.work.take().is_some() {
                // Whoever wanted it has gone.
                self.executor.drop_image();
            }
            return found;
        };
        let time = if busy {
            match self.images.allowance.left() {
                Some(left) => left,
                None => return found,
            }
        } else {
            ALONE
        };
        let before = self.now();
        let done = catch_unwind(AssertUnwindSafe(|| self.encode(&picture, digest, time)));
        let took = self.now().saturating_sub(before);
        if busy {
            self.images.allowance.spend(took);
        }
        Metrics::add(&self.shared.metrics.tower_us, took.as_micros() as u64);
        match done {
            Ok(Ok(true)) => self.finish_picture(digest),
            Ok(Ok(false)) => {}
            Ok(Err(error)) => {
                tracing::error!(%error, "an image could not be encoded");
                if matches!(error, ExecError::Lost { .. }) {
                    let _ = self.shared.lost.set(error.to_string());
                }
                self.fail_picture(digest, &RequestError::Device(error.to_string()));
            }
            Err(panic) => self.fail_picture(digest, &RequestError::Panic(panic_text(panic.as_ref()))),
        }
        true
    }

    fn encode(&mut self, picture: &TowerImage, digest: [u8; 32], time: Duration) -> Result<bool, ExecError> {
        if self.images.work != Some(digest) {
            self.images.work = Some(digest);
            self.executor.begin_image(picture)?;
        }
        self.executor.encode_image(time, &mut self.images.rows)
    }

    /// Rows that are kept go to whoever waits for them; rows that a sequence is past leave it.
    fn take_from_cache(&mut self) -> bool {
        let mut found = false;
        let cache = &mut self.images.cache;
        for sequence in self.scheduler.slots.iter_mut().flatten().filter(|s| !s.images.is_empty()) {
            let Some(computed) = sequence.kv.as_ref().map(muser_kv::KvSeq::len) else { continue };
            for image in sequence.images.iter_mut().filter(|image| image.picture.is_some()) {
                if image.end() <= computed {
                    image.rows = None;
                } else if image.rows.is_none()
                    && let Some(rows) = cache.get(&image.digest)
                    && image.fits(&rows, self.hidden)
                {
                    image.rows = Some(rows);
                    Metrics::add(&self.shared.metrics.image_cache_hits, 1);
                    found = true;
                }
            }
        }
        found
    }

    /// The picture to work on: the first that the first sequence in rank waits for. One in work is finished first if anybody
    /// wants it.
    fn next_picture(&self) -> Option<(TowerImage, [u8; 32])> {
        let wanted = |sequence: &crate::sequence::Sequence| {
            let computed = sequence.kv.as_ref().map(muser_kv::KvSeq::len)?;
            let mut images = sequence.images.iter().filter(|image| image.is_wanted(computed));
            let in_work = images.clone().find(|image| Some(image.digest) == self.images.work);
            let image = in_work.or_else(|| images.next())?;
            Some((in_work.is_none(), sequence.rank(), image.picture.clone()?, image.digest))
        };
        let all = self.scheduler.slots.iter().flatten().filter_map(wanted);
        all.min_by_key(|(other, rank, ..)| (*other, *rank)).map(|(.., picture, digest)| (picture, digest))
    }

    fn finish_picture(&mut self, digest: [u8; 32]) {
        self.images.work = None;
        let rows: Arc<[f32]> = self.images.rows.as_slice().into();
        let metrics = &self.shared.metrics;
        Metrics::add(&metrics.images_encoded, 1);
        Metrics::add(&metrics.image_rows_encoded, (rows.len() / self.hidden) as u64);
        for sequence in self.scheduler.slots.iter_mut().flatten() {
            let waits = |image: &&mut PlacedImage| {
                image.digest == digest && image.picture.is_some() && image.rows.is_none()
            };
            for image in sequence.images.iter_mut().filter(waits) {
                if image.fits(&rows, self.hidden) {
                    image.rows = Some(Arc::clone(&rows));
                }
            }
        }
        self.images.cache.put(digest, rows);
        Metrics::set(&metrics.image_cache_bytes, self.images.cache.held() as u64);
        // A digest that stands for pictures of different sizes is its maker's fault; nobody may wait for ever.
        let error = RequestError::Device("an image digest stands for two pictures".into());
        if self.waiting_for(digest).next().is_some() {
            self.fail_picture(digest, &error);
        }
    }

    /// Ends the requests that wait for a picture which cannot be had.
    fn fail_picture(&mut self, digest: [u8; 32], error: &RequestError) {
        Metrics::add(&self.shared.metrics.image_errors, 1);
        self.images.work = None;
        self.executor.drop_image();
        let now = self.now();
        let slots: Vec<usize> = self.waiting_for(digest).collect();
        for slot in slots {
            if let Some(sequence) = self.scheduler.vacate(slot) {
                self.end(&sequence, &End::Fail(error.clone()), now);
            }
        }
    }

    /// Slots whose sequences want rows of a picture.
    fn waiting_for(&self, digest: [u8; 32]) -> impl Iterator<Item = usize> {
        let waits = move |sequence: &crate::sequence::Sequence| {
            let computed = sequence.computed();
            sequence.images.iter().any(|image| image.digest == digest && image.is_wanted(computed))
        };
        let slots = self.scheduler.slots.iter().enumerate();
        slots.filter(move |(_, sequence)| sequence.as_ref().is_some_and(waits)).map(|(slot, _)| slot)
    }
}
