//! The sampler's randomness: Philox 4x32-10, a counter-based generator (Salmon et al., 2011).
//!
//! There is no state. A number is a function of the seed (the key) and of what it is for (the counter): position of the
//! token, choice of the request, and a stream for each purpose. So the same seed and logits give the same token whatever
//! else ran before, after or beside it, and drafts can be drawn out of order.

/// What a random number is for. Streams are independent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Drawing a token from the target's distribution.
    Sample = 0,
    /// Drawing a draft proposal.
    Draft = 1,
    /// Accepting or rejecting a proposal.
    Accept = 2,
    /// Drawing from what is left after a rejection.
    Residual = 3,
}

/// A number in `[0, 1)` with 53 random bits.
///
/// `position` counts the tokens of choice `index` as if nothing had ever been shifted out of the context.
pub fn uniform(seed: u64, index: u32, position: u64, stream: Stream) -> f64 {
    let counter = [position as u32, (position >> 32) as u32, index, stream as u32];
    let out = philox(counter, [seed as u32, (seed >> 32) as u32]);
    let bits = u64::from(out[0]) << 32 | u64::from(out[1]);
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..10 {
        if round > 0 {
            key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
        }
        let low = u64::from(counter[0]) * 0xD251_1F53;
        let high = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (high >> 32) as u32 ^ counter[1] ^ key[0],
            high as u32,
            (low >> 32) as u32 ^ counter[3] ^ key[1],
            low as u32,
        ];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_published_vectors() {
        let check = |counter, key, expected| assert_eq!(philox(counter, key), expected);
        check([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        check([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        check(
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        );
    }

    #[test]
    fn numbers_are_uniform_and_streams_differ() {
        let n = 100_000;
        let mut buckets = [0u32; 16];
        let mut same = 0;
        for position in 0..n {
            let u = uniform(42, 0, position, Stream::Sample);
            assert!((0.0..1.0).contains(&u));
            buckets[(u * 16.0) as usize] += 1;
            same += u32::from(u == uniform(42, 0, position, Stream::Residual));
            same += u32::from(u == uniform(42, 1, position, Stream::Sample));
            same += u32::from(u == uniform(43, 0, position, Stream::Sample));
        }
        let expected = n as f64 / 16.0;
        let chi: f64 = buckets.iter().map(|&b| (f64::from(b) - expected).powi(2) / expected).sum();
        // 15 degrees of freedom: 99.99 % lie below 44.3.
        assert!(chi < 44.3, "chi-square {chi}");
        assert_eq!(same, 0);
    }
}
