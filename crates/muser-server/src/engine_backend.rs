//! The running engine behind the routes.

use muser_backend::TowerInfo;
use muser_engine::{EngineHandle, Request, RestoreFailure, Shutdown, SlotState, SubmitError};

use crate::backend::{Backend, EventStream, Numerics, Slot, Snapshot};

/// A [`Backend`] over a running engine.
#[derive(Debug)]
pub struct LiveEngine {
    engine: EngineHandle,
    device: String,
}

impl LiveEngine {
    /// Serves from `engine`; `device` says in words what it runs on.
    pub fn new(engine: EngineHandle, device: String) -> Self {
        Self { engine, device }
    }
}

impl Backend for LiveEngine {
    fn submit(&self, request: Request) -> Result<EventStream, SubmitError> {
        let submission = self.engine.submit(request)?;
        Ok(EventStream { seed: submission.seed(), events: Box::pin(submission) })
    }

    fn tower(&self) -> Option<TowerInfo> {
        self.engine.limits().tower.clone()
    }

    fn lost(&self) -> Option<String> {
        self.engine.lost().map(str::to_owned)
    }

    fn snapshot(&self) -> Snapshot {
        let now = self.engine.metrics();
        let slots = self.engine.slots();
        let info = self.engine.info();
        let bytes = |full: u64, sliding: u64| {
            full * info.full_block_bytes as u64 + sliding * info.sliding_block_bytes as u64
        };
        Snapshot {
            slots: slots
                .iter()
                .map(|slot| {
                    let busy = slot.state != SlotState::Idle;
                    let if_busy = |figure: u32| if busy { figure as usize } else { 0 };
                    Slot {
                        id: slot.slot,
                        busy,
                        prompt_tokens: if_busy(slot.prompt_tokens),
                        processed_tokens: if_busy(slot.computed_tokens.min(slot.prompt_tokens)),
                        cached_tokens: if_busy(slot.cached_tokens),
                        generated_tokens: if_busy(slot.generated_tokens),
                    }
                })
                .collect(),
            running: now.running,
            waiting: now.waiting,
            kv_blocks_used: now.full_blocks_used,
            kv_blocks_total: now.full_blocks_total,
            kv_bytes_used: bytes(now.full_blocks_used, now.sliding_blocks_used),
            kv_bytes_kept: bytes(now.full_blocks_cached, now.sliding_blocks_cached),
            kv_bytes_total: now.kv_bytes_total,
            prefix_queries: now.prompt_tokens,
            prefix_hits: now.cached_tokens,
            external_queries: now.external_queries,
            external_hits: now.external_hits,
            handed_tokens: now.handed_tokens,
            prefill_rows: now.prefill_rows,
            prefill_rate: now.prefill_rate,
            restore_failures: RestoreFailure::ALL
                .into_iter()
                .map(|reason| (reason.label(), now.restore_failures(reason)))
                .collect(),
            pack_refusals: Vec::new(),
            pack_unlike: 0,
            packs: 0,
            pack_bytes: 0,
            host_bytes: now.host_bytes_held,
            host_blocks_restored: now.restored_blocks,
            steps: now.step_time,
            draft_rounds: now.draft_time,
            restores: now.restore_time,
            exports: now.export_time,
            images_encoded: now.images_encoded,
            image_rows_encoded: now.image_rows_encoded,
            tower_time: std::time::Duration::from_micros(now.tower_us),
            image_cache_hits: now.image_cache_hits,
            image_errors: now.image_errors,
            image_cache_bytes: now.image_cache_bytes,
            preemptions: now.preemptions,
            turnaround: std::time::Duration::from_micros(now.turnaround_us),
            drafts: now.drafts,
            drafted: now.drafted_tokens,
            drafted_accepted: now.accepted_tokens,
            drafted_accepted_by_place: {
                let proposed = now.drafted_by_place.iter().take_while(|&&n| n > 0).count();
                now.accepted_by_place[..proposed].to_vec()
            },
        }
    }

    fn slots(&self) -> usize {
        self.engine.limits().parallel
    }

    fn abort_all(&self) {
        self.engine.shut_down(Shutdown::Cancel);
    }

    fn device(&self) -> String {
        self.device.clone()
    }

    fn numerics(&self) -> Numerics {
        let info = self.engine.info();
        Numerics { kv_type: info.kv_type.name(), route: info.route.clone() }
    }
}
