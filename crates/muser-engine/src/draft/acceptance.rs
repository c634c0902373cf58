//! How often proposals have been right, by their place in the block.
//!
//! A sequence's own past counts most and fades; where it has little, the past of all sequences fills in, and where that has
//! little, each place is taken to be nearly as good as the one before it.

/// Places that are told apart; no more proposals are ever made.
pub(crate) const MOST_PROPOSALS: usize = 31;

/// Chance of a first proposal before anything is known.
const UNKNOWN: f32 = 0.6;
/// A place against the one before it, where nothing is known of it.
const LATER: f32 = 0.97;

/// Tries that a prior counts for.
const PRIOR: f32 = 6.0;

/// Probability that a proposal is right if those before it are, by place.
pub(crate) type Rates = [f32; MOST_PROPOSALS];

/// What the proposals made so far came to. Older ones count less.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Acceptance {
    tried: [f32; MOST_PROPOSALS],
    right: [f32; MOST_PROPOSALS],
    keep: f32,
}

impl Acceptance {
    /// Of one sequence: the last twenty-five rounds or so.
    pub(crate) fn of_sequence() -> Self {
        Self { tried: [0.0; MOST_PROPOSALS], right: [0.0; MOST_PROPOSALS], keep: 0.96 }
    }

    /// Of all sequences: some hundred rounds.
    pub(crate) fn of_all() -> Self {
        Self { keep: 0.995, ..Self::of_sequence() }
    }

    /// Of `proposed` proposals the first `accepted` were right. What lay behind the first wrong one says nothing.
    pub(crate) fn note(&mut self, proposed: usize, accepted: usize) {
        for place in 0..(accepted + 1).min(proposed).min(MOST_PROPOSALS) {
            self.tried[place] = self.tried[place] * self.keep + 1.0;
            self.right[place] = self.right[place] * self.keep + f32::from(u8::from(place < accepted));
        }
    }

    #[cfg(test)]
    pub(crate) fn tries(&self) -> f32 {
        self.tried.iter().sum()
    }

    /// The rates of all sequences together.
    #[cfg(test)]
    pub(crate) fn rates(&self) -> Rates {
        self.rates_but_for(None)
    }

    /// The rates of a sequence whose past is a part of that of `all`.
    pub(crate) fn rates_among(&self, all: &Self) -> Rates {
        // What it has seen itself must not count twice.
        let prior = all.rates_but_for(Some(self));
        std::array::from_fn(|place| (self.right[place] + PRIOR * prior[place]) / (self.tried[place] + PRIOR))
    }

    fn rates_but_for(&self, one: Option<&Self>) -> Rates {
        let mut rates = [0.0; MOST_PROPOSALS];
        let mut before = UNKNOWN / LATER;
        for (place, rate) in rates.iter_mut().enumerate() {
            let (tried, right) = one.map_or((0.0, 0.0), |one| (one.tried[place], one.right[place]));
            let tried = (self.tried[place] - tried).max(0.0);
            let right = (self.right[place] - right).clamp(0.0, tried);
            *rate = (right + PRIOR * before * LATER) / (tried + PRIOR);
            before = *rate;
        }
        rates
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_go_from_the_prior_to_what_is_seen() {
        let mut all = Acceptance::of_all();
        assert!((all.rates()[0] - UNKNOWN).abs() < 1e-6);
        assert!(all.rates().windows(2).all(|pair| pair[1] < pair[0]));
        for i in 0..2000 {
            // Three in four first proposals are right, then half of the second ones, none after.
            all.note(4, [0, 1, 2, 1, 2, 0, 1, 2][i % 8]);
        }
        let rates = all.rates();
        assert!((rates[0] - 0.75).abs() < 0.02 && (rates[1] - 0.5).abs() < 0.02, "{rates:?}");
        assert!(rates[2] < 0.05 && rates[3] < 0.05);

        let mut own = Acceptance::of_sequence();
        assert!(own.rates_among(&all).iter().zip(&rates).all(|(a, b)| (a - b).abs() < 1e-6));
        (0..100).for_each(|_| own.note(2, 2));
        let own_rates = own.rates_among(&all);
        assert!(own_rates[0] > 0.9 && own_rates[1] > 0.83, "{own_rates:?}");
        (0..100).for_each(|_| own.note(2, 0));
        assert!(own.rates_among(&all)[0] < 0.25);
    }

    #[test]
    fn nothing_is_learnt_behind_the_first_wrong_proposal() {
        let (mut short, mut long) = (Acceptance::of_all(), Acceptance::of_all());
        short.note(2, 1);
        long.note(100, 1);
        assert_eq!(short, long);
        long.note(0, 0);
        assert_eq!(short, long);
    }
}
