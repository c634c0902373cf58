//! How things stand, for whoever looks from outside.

use std::sync::atomic::Ordering;

use muser_kv::GroupStats;

use crate::{SlotView, metrics::Metrics, planner::Load, scheduler::Scheduler, shared::Shared};

/// Rows of the steps whose rate is told, and the depth of deep ones.
const RATE_ROWS: usize = 512;
const DEEP: usize = 32_768;

/// Writes down how things stand.
pub(crate) fn publish(scheduler: &Scheduler, shared: &Shared) {
    let metrics = &shared.metrics;
    let stats = scheduler.memory.stats();
    let held = |group: GroupStats| u64::from(group.used + group.cached);
    let aside = scheduler.slots.aside();
    Metrics::set(&metrics.waiting, (scheduler.waiting().len() + shared.inbox.len() + aside) as u64);
    Metrics::set(&metrics.fetching, aside as u64);
    Metrics::set(&metrics.running, scheduler.slots.seated().count() as u64);
    Metrics::set(&metrics.queued_rows, scheduler.queued_rows() as u64);
    for (gauge, depth) in [(&metrics.prefill_rate, 0), (&metrics.deep_prefill_rate, DEEP)] {
        let cost = &scheduler.cost;
        let seconds = cost.expected(Load::of(RATE_ROWS, depth)).filter(|_| cost.knows_many());
        let rate = seconds.map_or(0.0, |seconds| RATE_ROWS as f64 / seconds.max(1e-9));
        Metrics::set(gauge, rate as u64);
    }
    Metrics::set(&metrics.full_blocks_used, u64::from(stats.full.used));
    Metrics::set(&metrics.full_blocks_cached, u64::from(stats.full.cached));
    Metrics::set(&metrics.full_blocks_total, u64::from(stats.full.total));
    Metrics::set(&metrics.sliding_blocks_used, u64::from(stats.sliding.used));
    Metrics::set(&metrics.sliding_blocks_cached, u64::from(stats.sliding.cached));
    Metrics::set(&metrics.sliding_blocks_total, u64::from(stats.sliding.total));
    Metrics::set(&metrics.evicted_blocks, stats.evicted);
    Metrics::set(&metrics.host_bytes_held, scheduler.memory.host_bytes_held() as u64);
    let (full, sliding) = (shared.info.full_block_bytes as u64, shared.info.sliding_block_bytes as u64);
    Metrics::set(&metrics.kv_bytes_held, held(stats.full) * full + held(stats.sliding) * sliding);
    Metrics::set(&metrics.kv_bytes_total, shared.limits.kv_bytes);
    for (slot, cell) in shared.slots.iter().enumerate() {
        match scheduler.slots.get(slot) {
            None => cell.clear(),
            Some(sequence) => cell.write(&SlotView {
                slot,
                state: sequence.state(),
                request: sequence.task.id,
                index: sequence.index,
                prompt_tokens: sequence.task.prompt_tokens,
                cached_tokens: sequence.task.cached_tokens.load(Ordering::Relaxed),
                computed_tokens: sequence.computed() as u32,
                generated_tokens: sequence.progress.generated(),
            }),
        }
    }
}
