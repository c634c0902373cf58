//! Where a prompt is read soonest: a pure function of what nodes said and what was measured.

use std::time::Duration;

/// What is known of having a prompt read by a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Offer {
    /// Until it can begin.
    pub(crate) wait: Duration,
    /// Computing what it lacks.
    pub(crate) compute: Duration,
    /// All bytes on their way.
    pub(crate) transfer: Duration,
    /// Of these, the ones that are final only when all is computed: they hide behind nothing.
    pub(crate) last: Duration,
    pub(crate) round_trip: Duration,
}

impl Offer {
    /// Until all of it is here.
    pub(crate) fn total(&self) -> Duration {
        // Bytes leave while later rows are computed, but for the last ones.
        let hidden = self.transfer.saturating_sub(self.last);
        self.wait + self.compute.max(hidden) + self.last + self.round_trip
    }
}

/// Offers within this of the soonest are as good.
const ALIKE: f64 = 1.1;

/// The offers that are sooner than computing here, soonest first; of the best three that are alike a drawn one is first, so that
/// many consumers do not all run to the same node. `local`: `None` where nothing was measured yet.
pub(crate) fn soonest(offers: &[Offer], local: Option<Duration>, draw: u64) -> Vec<usize> {
    let mut sooner: Vec<usize> =
        (0..offers.len()).filter(|&index| local.is_none_or(|local| offers[index].total() < local)).collect();
    sooner.sort_by_key(|&index| offers[index].total());
    let Some(&best) = sooner.first() else { return sooner };
    let limit = offers[best].total().mul_f64(ALIKE);
    let alike = sooner.iter().take(3).filter(|&&index| offers[index].total() <= limit).count();
    sooner[..alike].rotate_left((draw % alike as u64) as usize);
    sooner
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn offer(wait: u64, compute: u64, transfer: u64, last: u64) -> Offer {
        Offer {
            wait: ms(wait),
            compute: ms(compute),
            transfer: ms(transfer),
            last: ms(last),
            round_trip: ms(1),
        }
    }

    #[test]
    fn bytes_hide_behind_computing_but_for_the_last() {
        assert_eq!(offer(10, 100, 50, 20).total(), ms(131));
        assert_eq!(offer(10, 100, 500, 20).total(), ms(511));
        assert_eq!(offer(0, 0, 30, 30).total(), ms(31));
    }

    #[test]
    fn the_soonest_of_nodes_and_here() {
        let offers = [offer(0, 300, 10, 1), offer(0, 100, 10, 1), offer(500, 50, 10, 1)];
        assert_eq!(soonest(&offers, Some(ms(400)), 0), [1, 0]);
        assert_eq!(soonest(&offers, Some(ms(400)), 7), [1, 0], "nobody is like the best");
        assert_eq!(soonest(&offers, Some(ms(60)), 0), [0; 0]);
        assert_eq!(soonest(&offers, None, 0), [1, 0, 2]);
        assert_eq!(soonest(&[], None, 0), [0; 0]);
    }

    #[test]
    fn those_that_are_alike_take_turns() {
        let offers = [offer(0, 100, 0, 0), offer(0, 105, 0, 0), offer(0, 108, 0, 0), offer(0, 109, 0, 0)];
        let mut firsts: Vec<usize> = (0..9).map(|draw| soonest(&offers, None, draw)[0]).collect();
        firsts.sort_unstable();
        assert_eq!(firsts, [0, 0, 0, 1, 1, 1, 2, 2, 2], "of the best three");
    }
}
