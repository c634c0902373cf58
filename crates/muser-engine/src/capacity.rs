//! How a byte budget becomes blocks of the two groups.

use muser_backend::{ExecutorInfo, KvCapacity};
use muser_kv::BLOCK_LEN;
use muser_model::Geometry;

use crate::{EngineConfig, EngineError, config::MOST_PARALLEL};

/// Budget when none is given, unless one sequence of full context needs more.
const DEFAULT_BUDGET: u64 = 4 << 30;

/// Positions that a sequence is taken to need where nobody says how many sequences there are to be.
const USUAL_POSITIONS: usize = 8192;
/// Most sequences together where K and V are in host memory: more rows in a step are no faster a row there.
const MOST_ON_HOST: usize = 16;

/// How many sequences the memory for K and V bears if each has a window and 8,192 positions (or its whole context, if that is less): at
/// least 1, at most 256 on a device with memory of its own and 16 elsewhere. Sequences share memory, so longer ones fit, too, if
/// others are shorter.
pub fn parallel_that_fits(
    geometry: &Geometry,
    info: &ExecutorInfo,
    config: &EngineConfig,
    context: usize,
) -> usize {
    let positions = context.min(USUAL_POSITIONS).div_ceil(BLOCK_LEN) as u64;
    let each = positions * info.full_block_bytes as u64
        + sliding_per_sequence(geometry, config) as u64 * info.sliding_block_bytes as u64;
    let room = config.kv_bytes.or(info.kv_room).unwrap_or(DEFAULT_BUDGET);
    let most = if info.kv_room.is_some() { MOST_PARALLEL } else { MOST_ON_HOST };
    usize::try_from(room / each.max(1)).unwrap_or(most).clamp(1, most)
}

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
    let usual = info.kv_room.unwrap_or(DEFAULT_BUDGET.max(one));
    let budget = config.kv_bytes.unwrap_or(everything.min(usual));

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
    fn as_many_sequences_as_memory_bears() {
        let geometry = testing::geometry(131_072, 512);
        let mut info = testing::info(&geometry);
        let config = EngineConfig::default();
        let each = 32 * info.full_block_bytes as u64
            + sliding_per_sequence(&geometry, &config) as u64 * info.sliding_block_bytes as u64;
        let fits = |info: &ExecutorInfo, kv_bytes, context| {
            parallel_that_fits(&geometry, info, &EngineConfig { kv_bytes, ..config.clone() }, context)
        };
        // Host memory: up to 16, from 4 GiB unless a budget is named.
        assert_eq!(fits(&info, None, 131_072), 16);
        assert_eq!(fits(&info, Some(3 * each), 131_072), 3);
        assert_eq!(fits(&info, Some(4 * each - 1), 131_072), 3);
        assert_eq!(fits(&info, Some(1), 131_072), 1);
        // A short context needs less.
        assert!(fits(&info, Some(3 * each), 256) > 3);
        // A card: up to 256, from what it has left.
        info.kv_room = Some(20 * each);
        assert_eq!(fits(&info, None, 131_072), 20);
        info.kv_room = Some(u64::MAX);
        assert_eq!(fits(&info, None, 131_072), 256);
    }

    #[test]
    fn a_device_gives_what_it_has_left() {
        let geometry = testing::geometry(4096, 512);
        let mut info = testing::info(&geometry);
        let config = EngineConfig { parallel: 256, ..EngineConfig::default() };
        info.kv_room = Some(40 * info.full_block_bytes as u64);
        let capacity = split(&geometry, &info, &config, 4096).expect("fits");
        let bytes = capacity.full as usize * info.full_block_bytes
            + capacity.sliding as usize * info.sliding_block_bytes;
        assert!(bytes <= 40 * info.full_block_bytes && bytes > 38 * info.full_block_bytes, "{capacity:?}");
    }

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
