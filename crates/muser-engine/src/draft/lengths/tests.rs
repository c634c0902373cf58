//! The choice of lengths against machines that are only formulas.

use std::time::Duration;

use super::*;
use crate::{draft::acceptance::Acceptance, testing::Rng};

/// A machine and a text: costs in milliseconds, and how often proposals are right.
#[derive(Clone, Copy)]
struct World {
    step: fn(usize) -> f64,
    draft: fn(usize) -> f64,
    right: f64,
    /// Largest disturbance of a figure, as a share of it.
    noise: f64,
}

struct Outcome {
    /// Plain decoding's time for the same tokens over the time that it took.
    speedup: f64,
    /// Proposals per round and sequence over the last quarter.
    length: f64,
    /// Mean of predicted over measured time of the rounds with proposals, after the first tenth.
    forecast: f64,
}

/// Decodes with `count` sequences for `rounds` rounds, learning as it goes.
fn simulate(world: World, count: usize, rounds: usize, most: usize, seed: u64) -> Outcome {
    let mut random = Rng(seed << 32);
    let mut chance = move || random.below(1 << 20) as f64 / (1u64 << 20) as f64;
    let mut lengths = Lengths::new();
    let mut all = Acceptance::of_all();
    let mut own = vec![Acceptance::of_sequence(); count];
    let mut chosen = vec![0; count];
    let (mut time, mut tokens, mut late) = (0.0, 0.0, 0);
    let (mut predicted, mut measured) = (0.0, 0.0);
    for round in 0..rounds {
        let sequences: Vec<_> =
            own.iter().map(|own| Drafting { most, rates: own.rates_among(&all) }).collect();
        chosen.fill(0);
        let awake = !lengths.skips_round(count);
        let forecast = if awake { lengths.choose(&sequences, 256, &mut chosen) } else { None };
        // Mostly a little slower, at times a lot.
        let mut disturb = |cost: f64| {
            let wild = if world.noise > 0.0 && chance() < 0.02 { 3.0 } else { 1.0 };
            cost * wild * (1.0 + world.noise * chance())
        };
        let proposals: usize = chosen.iter().sum();
        let step = disturb((world.step)(count + proposals));
        let mut cost = step;
        lengths.step.note(count + proposals, Duration::from_secs_f64(step * 1e-3));
        if proposals > 0 {
            let rows = proposals + chosen.iter().filter(|&&n| n > 0).count();
            let draft = disturb((world.draft)(rows));
            cost += draft;
            lengths.draft.note(rows, Duration::from_secs_f64(draft * 1e-3));
            if round > rounds / 10 {
                predicted += forecast.expect("nobody drafts without").seconds * 1e3;
                measured += cost;
            }
        }
        time += cost;
        for (own, &proposed) in own.iter_mut().zip(&chosen) {
            let accepted = (0..proposed).take_while(|_| chance() < world.right).count();
            own.note(proposed, accepted);
            all.note(proposed, accepted);
            tokens += 1.0 + accepted as f64;
        }
        late += if round >= rounds * 3 / 4 { proposals } else { 0 };
    }
    let mean = 1.0 + world.noise / 2.0 + if world.noise > 0.0 { 0.04 } else { 0.0 };
    Outcome {
        speedup: tokens / count as f64 * (world.step)(count) * mean / time,
        length: late as f64 / (rounds.div_ceil(4) * count) as f64,
        forecast: predicted / measured,
    }
}

/// The best that a fixed length gives.
fn best_fixed(world: World, count: usize, most: usize) -> f64 {
    let gain = |k: usize| {
        let tokens: f64 = (0..=k).map(|i| world.right.powi(i as i32)).sum();
        let draft = if k > 0 { (world.draft)(count * (k + 1)) } else { 0.0 };
        tokens * (world.step)(count) / ((world.step)(count * (k + 1)) + draft)
    };
    (0..=most).map(gain).fold(0.0, f64::max)
}

/// Bound by memory: rows cost little.
fn memory_bound(right: f64) -> World {
    World { step: |r| 100.0 + 4.0 * (r as f64 - 1.0), draft: |r| 15.0 + r as f64, right, noise: 0.0 }
}

/// Bound by arithmetic: rows cost nearly what a step costs.
fn compute_bound(right: f64) -> World {
    World { step: |r| 0.2 + 0.8 * r as f64, draft: |r| 0.3 + 0.1 * r as f64, right, noise: 0.0 }
}

#[test]
fn it_comes_near_the_best_fixed_length_wherever_drafting_pays() {
    for right in [0.4, 0.6, 0.8, 0.95] {
        for count in [1, 4] {
            let best = best_fixed(memory_bound(right), count, 15);
            for noise in [0.0, 0.1] {
                let world = World { noise, ..memory_bound(right) };
                let found = simulate(world, count, 600, 15, 7);
                assert!(
                    found.speedup > 0.92 * best,
                    "{right} {count} noise {noise}: {:.3} of {best:.3}, length {:.2}",
                    found.speedup,
                    found.length
                );
                assert!((found.forecast - 1.0).abs() < 0.1, "forecast {:.3}", found.forecast);
            }
        }
    }
}

#[test]
fn where_drafting_loses_it_is_left_off_from_the_start() {
    for right in [0.0, 0.3, 0.6] {
        for count in [1, 8] {
            for noise in [0.0, 0.1] {
                for rounds in [100, 1000] {
                    let world = World { noise, ..compute_bound(right) };
                    let found = simulate(world, count, rounds, 15, 11);
                    // The simulated plain decoder's own noise is known only on average.
                    let least = if noise > 0.0 { 0.955 } else { 0.97 };
                    assert!(
                        found.speedup > least,
                        "{right} {count} noise {noise} rounds {rounds}: {:.3}",
                        found.speedup
                    );
                    assert!(found.length < 0.3, "{}", found.length);
                    // Tries become rare.
                    assert!(rounds < 1000 || found.length < 0.02, "{}", found.length);
                }
            }
        }
    }
}

#[test]
fn a_step_that_is_free_up_to_a_tile_is_filled_to_the_tile() {
    // Eight rows cost what two do: a straight line through one and two rows would never get there.
    let world = World {
        step: |r| if r == 1 { 10.0 } else { 12.0 * (r as f64 / 8.0).ceil() },
        draft: |_| 0.5,
        right: 0.8,
        noise: 0.0,
    };
    let found = simulate(world, 1, 2000, 15, 3);
    assert!(found.length > 5.0 && found.length < 8.5, "{}", found.length);
}

#[test]
fn sequences_that_are_easy_to_guess_get_the_proposals() {
    let mut lengths = Lengths::new();
    let world = memory_bound(0.0);
    for rows in [2, 6, 10, 20] {
        for _ in 0..4 {
            lengths.step.note(rows, Duration::from_secs_f64((world.step)(rows) * 1e-3));
            lengths.draft.note(rows, Duration::from_secs_f64((world.draft)(rows) * 1e-3));
        }
    }
    lengths.allowance = Some(0.0);
    let drafting = |rate, most| Drafting { most, rates: [rate; MOST_PROPOSALS] };
    let mut chosen = [0; 3];
    let sequences = [drafting(0.9, 15), drafting(0.2, 15), drafting(0.99, 2)];
    let forecast = lengths.choose(&sequences, 256, &mut chosen).expect("all is known");
    assert!(chosen[0] > 4 && chosen[1] <= 1 && chosen[2] == 2, "{chosen:?}");
    assert!(forecast.gain > 1.5);
    // The step has only so many rows.
    lengths.choose(&sequences, 5, &mut chosen);
    assert_eq!(chosen.iter().sum::<usize>(), 2);
    // Nobody can draft.
    let forecast = lengths.choose(&[drafting(0.9, 0)], 256, &mut chosen[..1]).expect("all is known");
    assert_eq!((chosen[0], forecast.gain), (0, 1.0));
    assert!(!lengths.is_deep_asleep(1), "at a text's end nothing is learnt about drafting");
}
