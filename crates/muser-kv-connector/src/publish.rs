//! The thread that publishes what the engine has computed.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use muser_engine::{ExportError, PrefixExport};
use muser_kv::KvGroup;
use muser_pack::PackError;

use crate::figures::Counters;
use crate::shared::Shared;

/// A rest is looked at this often: it ends early when the engine has nothing to do.
const NAP: Duration = Duration::from_millis(10);

/// How a publication ended.
enum End {
    Published,
    Known,
    Gone,
    Failed,
}

/// Publishes until the queue closes.
pub(crate) fn run(shared: &Arc<Shared>) {
    let mut buffer = Vec::new();
    while let Some(offer) = shared.offers.take() {
        let began = Instant::now();
        let end = catch_unwind(AssertUnwindSafe(|| publish(shared, &offer, &mut buffer)));
        let counters = &shared.counters;
        let counter = match end {
            Ok(End::Published) => &counters.published,
            Ok(End::Known) => &counters.known,
            Ok(End::Gone) => &counters.gone,
            Ok(End::Failed) | Err(_) => &counters.failed,
        };
        Counters::add(counter, 1);
        Counters::add(&counters.publish_us, began.elapsed().as_micros() as u64);
        drop(offer);
        shared.offers.done();
        if shared.offers.depth() == 0 {
            buffer = Vec::new();
        }
    }
}

fn publish(shared: &Shared, offer: &PrefixExport, buffer: &mut Vec<u8>) -> End {
    let failed = |error: &PackError| {
        tracing::warn!(reason = error.counter_name(), "a prefix is not kept: {error}");
        End::Failed
    };
    let mut throttle = Throttle { began: Instant::now() };
    let mut publication = match shared.library.begin_publish(&shared.scope_of(offer.scope()), offer.units()) {
        Ok(publication) => publication,
        Err(error) => return failed(&error),
    };
    let mut wanted = publication.wanted();
    wanted.retain(|wanted| offer.has(wanted.group, wanted.index));
    if wanted.is_empty() {
        return End::Known;
    }
    for wanted in wanted {
        throttle.rest(shared, offer);
        if shared.closed.load(Relaxed) {
            return End::Gone;
        }
        let (bytes, result) = offer.copy_out_blocking(wanted.group, wanted.index, std::mem::take(buffer));
        *buffer = bytes;
        match result {
            Ok(()) => {}
            Err(_) if wanted.group == KvGroup::Sliding => continue,
            Err(ExportError::Gone | ExportError::Stopped) => return End::Gone,
            Err(ExportError::Device) => return End::Failed,
        }
        if let Err(error) = publication.put(wanted.group, wanted.index, buffer) {
            return failed(&error);
        }
    }
    throttle.rest(shared, offer);
    if !shared.options.weights.iter().all(|files| files.are_unchanged()) {
        tracing::error!(
            "a model file was written to while it is in use: what is computed with it is not kept"
        );
        return End::Failed;
    }
    match publication.commit(false) {
        Ok(_) => End::Published,
        // Too few sliding blocks were left in memory for any place to resume at.
        Err(PackError::Caller { .. }) => End::Gone,
        Err(error) => failed(&error),
    }
}

/// Rests between pieces of work while the engine computes.
struct Throttle {
    began: Instant,
}

impl Throttle {
    fn rest(&mut self, shared: &Shared, offer: &PrefixExport) {
        let rest = self.began.elapsed() * shared.options.rest;
        let end = Instant::now() + rest;
        while offer.engine_is_computing() && !shared.closed.load(Relaxed) && shared.hurries.load(Relaxed) == 0
        {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            std::thread::sleep(left.min(NAP));
        }
        self.began = Instant::now();
    }
}
