//! How a byte budget becomes blocks of the two groups.

use muser_backend::{ExecutorInfo, KvCapacity};
use muser_kv::BLOCK_LEN;
use muser_model::Geometry;

use crate::{EngineConfig, EngineError};

/// Budget when none is given, unless one sequence of full context needs more.
const DEFAULT_BUDGET: u64 = 4 << 30;

/// Sliding blocks that one sequence may hold while it decodes: the window and the slack, which a block boundary may cut
/// at either end.
pub(crate) fn sliding_per_sequence(geometry: &Geometry, config: &EngineConfig) -> usize {
    (geometry.window + config.window_slack).div_ceil(BLOCK_LEN) + 2
}

/// Splits the budget. Sliding blocks for all live sequences come first (as far as half the budget goes), then full
/// blocks for all contexts, then sliding blocks for resume points of sequences that have ended.
pub(crate) fn split(
    geometry: &Geometry,
    info: &ExecutorInfo,
    config: &EngineConfig,
    context: usize,
) -> Result<KvCapacity, EngineError> {
    let full_bytes = (info.full_block_bytes as u64).max(1);
    let sliding_bytes = (info.sliding_block_bytes as u64).max(1);
    let parallel = config.parallel as u64;
    let per_context = context.div_ceil(BLOCK_LEN) as u64;
    let per_sequence = sliding_per_sequence(geometry, config) as u64;
    let most_full = parallel * per_context;
    // A sliding block always belongs to a full one, so more than that is never used; two sets per sequence are plenty.
    let most_sliding = (2 * parallel * per_sequence).min(most_full + 2 * parallel).max(per_sequence);
    let one = per_context * full_bytes + per_sequence * sliding_bytes;
    let everything = most_full * full_bytes + most_sliding * sliding_bytes;
    let budget = config.kv_bytes.unwrap_or(everything.min(DEFAULT_BUDGET.max(one)));

    let least_full = per_context.min(2);
    let needed = least_full * full_bytes + per_sequence * sliding_bytes;
    if budget < needed {
        return Err(EngineError::KvBudget { needed, budget });
    }
    let live = (parallel * per_sequence).min(budget / 2 / sliding_bytes).max(per_sequence);
    let full = ((budget - live * sliding_bytes) / full_bytes).min(most_full);
    let left = budget - live * sliding_bytes - full * full_bytes;
    let sliding = (live + left / sliding_bytes).min(most_sliding.max(live));
    let count = |n: u64| u32::try_from(n).unwrap_or(u32::MAX - 1);
    Ok(KvCapacity { full: count(full), sliding: count(sliding) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn a_budget_is_used_and_never_exceeded() {
        let geometry = testing::geometry(4096, 512);
        let info = testing::info(&geometry);
        let bytes = |c: KvCapacity| {
            c.full as usize * info.full_block_bytes + c.sliding as usize * info.sliding_block_bytes
        };
        for parallel in [1, 4, 16] {
            let config = |kv_bytes| EngineConfig { parallel, kv_bytes, ..EngineConfig::default() };
            let all = split(&geometry, &info, &config(None), 4096).expect("fits");
            assert_eq!(all.full as usize, parallel * 16);
            let mut refused = false;
            for budget in (0..bytes(all) * 2).step_by(bytes(all) / 57 + 1) {
                match split(&geometry, &info, &config(Some(budget as u64)), 4096) {
                    Ok(capacity) => {
                        assert!(bytes(capacity) <= budget, "{capacity:?} of {budget}");
                        assert!(capacity.sliding as usize >= sliding_per_sequence(&geometry, &config(None)));
                        assert!(capacity.full >= 2);
                    }
                    Err(EngineError::KvBudget { needed, .. }) => {
                        refused = true;
                        assert!(needed > budget as u64);
                        let exact = split(&geometry, &info, &config(Some(needed)), 4096);
                        assert!(exact.is_ok(), "the figure in the message works");
                    }
                    Err(other) => panic!("{other}"),
                }
            }
            assert!(refused);
        }
    }
}
