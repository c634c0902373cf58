//! Pictures of prompts: their rows are made when a step is about to need one, and not before.
//!
//! A prompt names a picture by digest and row count; that is all that the prefix lookup needs, so a prefix found in memory or in
//! a pack costs no tower row. A running sequence whose next rows lie in a picture waits for it, others go on: the tower works in
//! slices after steps, one part in ten of their time ([`Allowance`]). Rows are kept by digest ([`RowCache`]) as long as there
//! is room, and by the sequences that are not past them.

mod cache;
mod placed;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

use cache::RowCache;
use muser_backend::{ExecError, Executor, TowerImage};
pub(crate) use placed::{PlacedImage, ready_until, row};

use crate::{
    RequestError,
    error::panic_text,
    metrics::Metrics,
    sequence::{Blocks, Sequence},
    shared::Env,
    slots::Slots,
};

/// Longest stretch of tower work while nothing else is to be done: new requests and cancelling wait for it.
const ALONE: Duration = Duration::from_millis(20);
/// Of the time of steps, the tower gets one part in so many.
const SHARE: u32 = 10;

/// Pictures of all sequences: what is kept and what is in work.
pub(crate) struct Images {
    cache: RowCache,
    /// Digest of the picture that the tower has.
    work: Option<[u8; 32]>,
    /// What comes out of it.
    rows: Vec<f32>,
    allowance: Allowance,
    /// Values of a row.
    hidden: usize,
}

/// What a turn did for pictures.
#[derive(Debug, Default)]
pub(crate) struct ImageWork {
    /// Did anything happen?
    pub(crate) worked: bool,
    /// Who cannot go on, and why.
    pub(crate) failed: Option<(Vec<usize>, RequestError)>,
    /// The device is gone.
    pub(crate) lost: Option<String>,
}

impl Images {
    pub(crate) fn new(cache_bytes: usize, hidden: usize) -> Self {
        Self {
            cache: RowCache::new(cache_bytes),
            work: None,
            rows: Vec::new(),
            allowance: Allowance::default(),
            hidden,
        }
    }

    pub(crate) fn note_step(&mut self, took: Duration) {
        self.allowance.earn(took);
    }

    /// Gives sequences the rows they wait for, and the tower some time. `busy`: a step was run in this turn, and will be in the
    /// next.
    pub(crate) fn work(
        &mut self,
        executor: &mut dyn Executor,
        slots: &mut Slots,
        busy: bool,
        env: Env<'_>,
    ) -> ImageWork {
        let found = self.take_from_cache(slots, env.metrics);
        let nothing = ImageWork { worked: found, ..ImageWork::default() };
        let Some((picture, digest)) = self.next_picture(slots) else {
            if self.work.take().is_some() {
                // Whoever wanted it has gone.
                executor.drop_image();
            }
            return nothing;
        };
        let time = if busy { self.allowance.left() } else { Some(ALONE) };
        let Some(time) = time else { return nothing };
        let before = env.now();
        let encode = AssertUnwindSafe(|| self.encode(executor, &picture, digest, time));
        let done = catch_unwind(encode);
        let took = env.now().saturating_sub(before);
        if busy {
            self.allowance.spend(took);
        }
        Metrics::add(&env.metrics.tower_us, took.as_micros() as u64);
        let mut work = ImageWork { worked: true, ..ImageWork::default() };
        let error = match done {
            Ok(Ok(true)) => self.finish(digest, slots, env.metrics),
            Ok(Ok(false)) => None,
            Ok(Err(error)) => {
                tracing::error!(%error, "an image could not be encoded");
                let text = error.to_string();
                work.lost = matches!(error, ExecError::Lost { .. }).then(|| text.clone());
                Some(RequestError::Device(text))
            }
            Err(panic) => Some(RequestError::Panic(panic_text(panic.as_ref()))),
        };
        if let Some(error) = error {
            Metrics::add(&env.metrics.image_errors, 1);
            self.work = None;
            executor.drop_image();
            work.failed = Some((waiting_for(slots, digest).collect(), error));
        }
        work
    }

    fn encode(
        &mut self,
        executor: &mut dyn Executor,
        picture: &TowerImage,
        digest: [u8; 32],
        time: Duration,
    ) -> Result<bool, ExecError> {
        if self.work != Some(digest) {
            self.work = Some(digest);
            executor.begin_image(picture)?;
        }
        executor.encode_image(time, &mut self.rows)
    }

    /// Rows that are kept go to whoever waits for them; rows that a sequence is past leave it.
    fn take_from_cache(&mut self, slots: &mut Slots, metrics: &Metrics) -> bool {
        let mut found = false;
        for sequence in slots.running_mut().filter(|sequence| !sequence.text.images().is_empty()) {
            let Blocks::Live { kv, .. } = &sequence.blocks else { continue };
            for image in sequence.text.images_mut().iter_mut().filter(|image| image.picture.is_some()) {
                if image.end() <= kv.len() {
                    image.rows = None;
                } else if image.rows.is_none()
                    && let Some(rows) = self.cache.get(&image.digest)
                    && image.fits(&rows, self.hidden)
                {
                    image.rows = Some(rows);
                    Metrics::add(&metrics.image_cache_hits, 1);
                    found = true;
                }
            }
        }
        found
    }

    /// The picture to work on: the first that the first sequence in rank waits for. One in work is finished first if anybody
    /// wants it.
    fn next_picture(&self, slots: &Slots) -> Option<(TowerImage, [u8; 32])> {
        let wanted = |sequence: &Sequence| {
            let computed = sequence.blocks.kv().map(muser_kv::KvSeq::len)?;
            let mut images = sequence.text.images().iter().filter(|image| image.is_wanted(computed));
            let in_work = images.clone().find(|image| Some(image.digest) == self.work);
            let image = in_work.or_else(|| images.next())?;
            Some((in_work.is_none(), sequence.rank(), image.picture.clone()?, image.digest))
        };
        let all = slots.running().filter_map(wanted);
        all.min_by_key(|(other, rank, ..)| (*other, *rank)).map(|(.., picture, digest)| (picture, digest))
    }

    /// The rows of a picture are there. An error if they are not what everybody who waits for them expects.
    fn finish(&mut self, digest: [u8; 32], slots: &mut Slots, metrics: &Metrics) -> Option<RequestError> {
        self.work = None;
        let rows: Arc<[f32]> = self.rows.as_slice().into();
        Metrics::add(&metrics.images_encoded, 1);
        Metrics::add(&metrics.image_rows_encoded, (rows.len() / self.hidden) as u64);
        for sequence in slots.running_mut() {
            let waits = |image: &&mut PlacedImage| {
                image.digest == digest && image.picture.is_some() && image.rows.is_none()
            };
            for image in sequence.text.images_mut().iter_mut().filter(waits) {
                if image.fits(&rows, self.hidden) {
                    image.rows = Some(Arc::clone(&rows));
                }
            }
        }
        self.cache.put(digest, rows);
        Metrics::set(&metrics.image_cache_bytes, self.cache.held() as u64);
        // A digest that stands for pictures of different sizes is its maker's fault; nobody may wait for ever.
        let waits = waiting_for(slots, digest).next().is_some();
        waits.then(|| RequestError::Device("an image digest stands for two pictures".into()))
    }
}

/// Slots whose sequences want rows of a picture.
fn waiting_for(slots: &Slots, digest: [u8; 32]) -> impl Iterator<Item = usize> {
    let waits = move |sequence: &Sequence| {
        let computed = sequence.computed();
        sequence.text.images().iter().any(|image| image.digest == digest && image.is_wanted(computed))
    };
    slots.iter().filter(move |(_, sequence)| waits(sequence)).map(|(slot, _)| slot)
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
