//! How many rows and columns of tokens a picture becomes.

/// Rows and columns of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grid {
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
}

impl Grid {
    /// The grid for a picture of `width` by `height` pixels, a token being a square of `unit` pixels, of at most `cap` tokens.
    ///
    /// The shape that is nearest to the picture's among the sizes rounded down and up, each by itself. Where several are equally
    /// near (for every square picture that is no multiple of the unit), the reference takes the one that comes first in a
    /// Python set of pairs; that order is a fixed function of the pairs.
    pub fn choose(width: u32, height: u32, unit: u32, cap: u32) -> Grid {
        let (h, w, cap_f) = (f64::from(height), f64::from(width), f64::from(cap));
        let (mut r, mut c) = (h / f64::from(unit), w / f64::from(unit));
        let ratio = c / r;
        if r * c > cap_f {
            r = (cap_f / ratio).sqrt();
            c = r * ratio;
        }
        let mut order = SetOrder::default();
        for rows in [r.floor(), r.ceil()] {
            for cols in [c.floor(), c.ceil()] {
                order.insert((rows as u64, cols as u64));
            }
        }
        let fits = |&(rows, cols): &(u64, u64)| rows >= 1 && cols >= 1 && rows * cols <= u64::from(cap);
        let apart = |(rows, cols): (u64, u64)| (rows as f64 / cols as f64 - h / w).abs();
        // `min_by` keeps the first of equals.
        let best = order.pairs().filter(fits).min_by(|a, b| apart(*a).total_cmp(&apart(*b)));
        let at_least_one = |x: f64| x.round_ties_even().max(1.0) as u64;
        let (rows, cols) = best.unwrap_or_else(|| (at_least_one(r), at_least_one(c)));
        // A picture so long that one row or column of tokens is over the cap already.
        Grid { rows: rows.min(u64::from(cap)) as u32, cols: cols.min(u64::from(cap)) as u32 }
    }

    /// Tokens, and rows of the tower's result.
    pub fn tokens(self) -> u32 {
        self.rows * self.cols
    }
}

/// Up to four pairs of small integers in the order in which CPython walks a set that they were put into: a table of eight slots, a
/// pair's hash (the xxHash-like one of tuples) chooses the slot, a taken slot is probed past with more bits of the hash.
#[derive(Default)]
struct SetOrder {
    slots: [Option<(u64, u64)>; 8],
}

impl SetOrder {
    fn insert(&mut self, pair: (u64, u64)) {
        let mut perturb = tuple_hash(pair);
        let mut at = (perturb & 7) as usize;
        while self.slots[at].is_some_and(|held| held != pair) {
            perturb >>= 5;
            at = ((at * 5 + 1) as u64).wrapping_add(perturb) as usize & 7;
        }
        self.slots[at] = Some(pair);
    }

    fn pairs(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.slots.iter().flatten().copied()
    }
}

/// CPython's hash of a pair of small non-negative integers, each of which is its own hash.
fn tuple_hash(pair: (u64, u64)) -> u64 {
    const P1: u64 = 11_400_714_785_074_694_791;
    const P2: u64 = 14_029_467_366_897_019_727;
    const P5: u64 = 2_870_177_450_012_600_261;
    let lane = |acc: u64, x: u64| acc.wrapping_add(x.wrapping_mul(P2)).rotate_left(31).wrapping_mul(P1);
    lane(lane(P5, pair.0), pair.1).wrapping_add(2 ^ P5 ^ 0x35_d373)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(width: u32, height: u32, cap: u32, rows: u32, cols: u32) {
        assert_eq!(Grid::choose(width, height, 28, cap), Grid { rows, cols }, "{width}x{height}, cap {cap}");
    }

    #[test]
    fn the_sizes_of_the_specification() {
        check(224, 224, 4096, 8, 8);
        check(896, 896, 4096, 32, 32);
        check(1280, 720, 4096, 26, 46);
        check(1920, 1080, 4096, 39, 69);
        check(3840, 2160, 4096, 48, 85);
        check(4000, 3000, 4096, 55, 73);
        check(1792, 1792, 4096, 64, 64);
        check(517, 333, 4096, 12, 19);
        check(1000, 20, 4096, 1, 36);
    }

    #[test]
    fn no_picture_is_over_its_cap_or_without_a_token() {
        for cap in [1, 2, 7, 256, 4096] {
            for (width, height) in
                [(1, 1), (1, 16_384), (16_384, 1), (8192, 8192), (3, 5000), (16_384, 4096), (29, 29)]
            {
                let grid = Grid::choose(width, height, 28, cap);
                assert!((1..=cap).contains(&grid.tokens()), "{width}x{height}, cap {cap}: {grid:?}");
            }
        }
    }
}
