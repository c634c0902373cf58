//! Leaving drafting alone where it does not pay, for longer each time.
//!
//! One of these stands for each class of batch size. While it sleeps nobody drafts, nothing is reckoned, and steps leave out
//! the draft's context; towards the end of the sleep they compute it again, so that the next try is a fair one. A try that does
//! not pay doubles the next sleep, up to [`LONGEST`]; where not even proposals that are always right would pay, it grows by
//! eight. So what tries cost dies away, in one long text as over many short ones.

/// Rounds of the first sleep.
const SHORTEST: u64 = 64;
/// No sleep is longer.
const LONGEST: u64 = 4096;
/// Rounds before the end of a sleep that compute the draft's context again.
pub(crate) const WARMUP_ROUNDS: u64 = 16;

/// Classes of batch sizes: 1, 2, 3 to 4, 5 to 8, more.
pub(crate) const CLASSES: usize = 5;

/// The class of a batch of `count` sequences.
pub(crate) fn class_of(count: usize) -> usize {
    (count.max(1).next_power_of_two().trailing_zeros() as usize).min(CLASSES - 1)
}

/// Whether one class of batch sizes sleeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Backoff {
    /// Rounds of this sleep that are left.
    left: u64,
    /// Rounds of the last sleep; 0 before the first and after drafting has paid.
    length: u64,
    /// Woken, and not tried since.
    woken: bool,
}

impl Backoff {
    /// Counts a round. `true`: it is slept through.
    pub(crate) fn skips_round(&mut self) -> bool {
        let sleeps = self.left > 0;
        self.left = self.left.saturating_sub(1);
        self.woken |= sleeps && self.left == 0;
        sleeps
    }

    /// Sleeps, with no need for the draft's context?
    pub(crate) fn skips_context(&self) -> bool {
        self.left > WARMUP_ROUNDS
    }

    /// Is what is known of acceptance older than the last sleep?
    pub(crate) fn was_woken(&self) -> bool {
        self.woken
    }

    /// A round has proposals; did it pay by what is known?
    pub(crate) fn drafts(&mut self, pays: bool) {
        self.woken = false;
        if pays {
            self.length = 0;
        }
    }

    /// Nothing pays and nothing is to be tried: goes to sleep. `is_known`: costs have been measured often enough to rely on
    /// them; `is_hopeless`: by them not even the best proposals would pay.
    pub(crate) fn go_to_sleep(&mut self, is_known: bool, is_hopeless: bool) {
        let factor = match (is_known, is_hopeless) {
            (false, _) => 1,
            (true, false) => 2,
            (true, true) => 8,
        };
        self.length = (self.length * factor).clamp(SHORTEST, LONGEST);
        self.left = self.length;
        self.woken = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleeps_grow_while_nothing_pays_and_begin_anew_when_something_did() {
        let mut rest = Backoff::default();
        assert!(!rest.skips_round() && !rest.skips_context());
        let sleep = |rest: &mut Backoff, known, hopeless| {
            rest.go_to_sleep(known, hopeless);
            assert!(rest.skips_context() && !rest.was_woken());
            let (mut rounds, mut deep) = (0, 0);
            while rest.left > 0 {
                deep += u64::from(rest.skips_context());
                assert!(rest.skips_round());
                rounds += 1;
            }
            assert!(rest.was_woken() && !rest.skips_round());
            assert_eq!(rounds - deep, WARMUP_ROUNDS);
            rounds
        };
        assert_eq!([(); 3].map(|()| sleep(&mut rest, false, false)), [64, 64, 64]);
        assert_eq!([(); 3].map(|()| sleep(&mut rest, true, false)), [128, 256, 512]);
        assert_eq!([(); 2].map(|()| sleep(&mut rest, true, true)), [4096, 4096]);
        rest.drafts(false);
        assert!(!rest.was_woken());
        assert_eq!(sleep(&mut rest, true, false), 4096);
        rest.drafts(true);
        assert_eq!(sleep(&mut rest, true, true), 64);
    }

    #[test]
    fn batch_sizes_have_classes() {
        let found: Vec<usize> = (1..=17).map(class_of).collect();
        assert_eq!(found, [0, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4]);
        assert_eq!(class_of(0), 0);
    }
}
