//! What the kernels must know of a picture: places, positions, rotation, blocks, which patches see which keys.

use muser_backend::TowerImage;
use muser_backend::arith::vision::{self, PatchGrid, PositionRule};
use muser_kv::BLOCK_LEN;
use muser_model::VisionConfig;

/// Values of a run (`RunArgs` in `kernels/tower_attention.cuh`).
const RUN_LEN: usize = 4;

/// Where things lie in the array, in values of 32 bits.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Offsets {
    /// Row and column of each patch.
    pub(super) places: usize,
    /// Four places of the position table and their weights, of each patch.
    pub(super) taps: usize,
    /// `cos` of a head's pairs, then `sin`, of each patch.
    pub(super) rope: usize,
    /// Where K and V of each patch go, in full layers and in layers with windows.
    pub(super) slots: [usize; 2],
    /// Patches of each token.
    pub(super) merge: usize,
    /// Runs of CTAs in full layers and in layers with windows.
    pub(super) runs: [usize; 2],
}

/// One picture's.
pub(super) struct PicturePlan {
    pub(super) grid: PatchGrid,
    pub(super) tokens: usize,
    pub(super) blocks: usize,
    pub(super) offsets: Offsets,
    pub(super) data: Vec<u32>,
    /// First patch and end of the CTAs' runs, likewise.
    pub(super) runs: [Vec<(usize, usize)>; 2],
}

/// Index of full layers, and of those with windows.
pub(super) const FULL: usize = 0;
pub(super) const WINDOWS: usize = 1;

impl PicturePlan {
    /// `run`: patches of a CTA of the attention kernel.
    pub(super) fn new(
        c: &VisionConfig,
        rule: PositionRule,
        image: &TowerImage,
        grid: PatchGrid,
        run: usize,
    ) -> Self {
        let n = grid.count();
        let (order, ends) = grid.order(c.grid());
        let (mut data, mut offsets) = (Vec::new(), Offsets::default());
        let mut put = |at: &mut usize, values: &mut dyn Iterator<Item = u32>| {
            // Kernels read up to 16 bytes at a time.
            data.resize(data.len().next_multiple_of(4), 0);
            *at = data.len();
            data.extend(values);
        };
        put(&mut offsets.places, &mut order.iter().flat_map(|(y, x)| [*y as u32, *x as u32]));
        let taps = |place: &(usize, usize)| vision::position_taps(rule, grid, *place, c.grid());
        put(
            &mut offsets.taps,
            &mut order.iter().flat_map(taps).flat_map(|(at, weight)| [at as u32, (weight as f32).to_bits()]),
        );
        let rope = vision::rotations(c.head_dim(), &order, grid);
        put(&mut offsets.rope, &mut rope.iter().map(|x| x.to_bits()));

        let mut runs = [cut(0, n, run), Vec::new()];
        let (mut window_slots, mut keys) = (Vec::with_capacity(n), Vec::new());
        let (mut start, mut block) = (0, 0);
        for end in ends {
            window_slots.extend((0..end - start).map(|i| (block * BLOCK_LEN + i) as u32));
            let mine = cut(start, end, run);
            keys.extend(std::iter::repeat_n([block as u32, (end - start) as u32], mine.len()));
            runs[WINDOWS].extend(mine);
            block += (end - start).div_ceil(BLOCK_LEN);
            start = end;
        }
        put(&mut offsets.slots[FULL], &mut (0..n as u32));
        put(&mut offsets.slots[WINDOWS], &mut window_slots.into_iter());
        let of_full = runs[FULL].iter().flat_map(|(first, end)| [*first as u32, *end as u32, 0, n as u32]);
        put(&mut offsets.runs[FULL], &mut of_full.into_iter());
        let of_windows = runs[WINDOWS]
            .iter()
            .zip(&keys)
            .flat_map(|((first, end), [block, keys])| [*first as u32, *end as u32, *block, *keys]);
        put(&mut offsets.runs[WINDOWS], &mut of_windows.into_iter());

        let mut index = vec![0u32; n];
        for (number, (y, x)) in order.iter().enumerate() {
            index[y * grid.cols + x] = number as u32;
        }
        let (side, columns) = (c.merge, grid.cols / c.merge);
        let patch = |token: usize, s: usize| {
            let (y, x) = (token / columns * side + s / side, token % columns * side + s % side);
            index[y * grid.cols + x]
        };
        let squares = (0..image.tokens()).flat_map(|token| (0..side * side).map(move |s| (token, s)));
        put(&mut offsets.merge, &mut squares.map(|(token, s)| patch(token, s)));
        let blocks = block.max(n.div_ceil(BLOCK_LEN));
        Self { grid, tokens: image.tokens(), blocks, offsets, data, runs }
    }

    /// The runs that patches `from..to` lie in: where they are in the array, and how many.
    pub(super) fn runs_of(&self, kind: usize, from: usize, to: usize) -> (usize, usize) {
        let runs = &self.runs[kind];
        let first = runs.partition_point(|(_, end)| *end <= from);
        let end = runs.partition_point(|(first, _)| *first < to);
        (self.offsets.runs[kind] + first * RUN_LEN, end - first)
    }
}

/// `start..end` in pieces of `len`.
fn cut(start: usize, end: usize, len: usize) -> Vec<(usize, usize)> {
    (start..end).step_by(len).map(|first| (first, (first + len).min(end))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(rows: usize, cols: usize) -> PicturePlan {
        let c = VisionConfig { image: 168, hidden: 256, heads: 4, ..VisionConfig::released() };
        let image = TowerImage { rows, cols, rgb: Vec::new().into() };
        let grid = PatchGrid { rows: 2 * rows, cols: 2 * cols };
        PicturePlan::new(&c, PositionRule::Raster, &image, grid, 16)
    }

    #[test]
    fn every_patch_has_a_slot_of_its_own_and_one_run_in_both_kinds_of_layers() {
        for (rows, cols) in [(1, 1), (3, 3), (8, 9), (1, 40)] {
            let plan = plan(rows, cols);
            let n = plan.grid.count();
            for kind in [FULL, WINDOWS] {
                let mut slots = plan.data[plan.offsets.slots[kind]..][..n].to_vec();
                slots.sort_unstable();
                slots.dedup();
                assert!(slots.len() == n && slots.iter().all(|s| (*s as usize) < plan.blocks * BLOCK_LEN));
                let mut next = 0;
                for (i, (first, end)) in plan.runs[kind].iter().enumerate() {
                    assert_eq!(*first, next);
                    next = *end;
                    let run = &plan.data[plan.offsets.runs[kind] + i * RUN_LEN..][..RUN_LEN];
                    // The patch's slot lies among the keys of its run.
                    for patch in *first..*end {
                        let slot = plan.data[plan.offsets.slots[kind] + patch];
                        let at = slot - run[2] * BLOCK_LEN as u32;
                        assert!(at < run[3], "{patch} of {run:?}");
                    }
                }
                assert_eq!(next, n);
                for (from, to) in [(0, n), (n / 3, n / 2 + 1), (n - 1, n)] {
                    let (at, count) = plan.runs_of(kind, from, to);
                    let runs = &plan.data[at..at + count * RUN_LEN];
                    assert!(runs[0] as usize <= from && runs[runs.len() - 3] as usize >= to);
                }
            }
        }
    }
}
