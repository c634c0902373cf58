//! Masks that are not there in time: nobody else waits for them, and no text changes.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use crate::{
    Constraint, DraftLength, EngineConfig, Request, SamplingParams, TokenMask,
    testing::{Bench, VOCAB, request, stem},
};

/// Forbids the ids that are like the last one; its mask is there after some looks.
struct Late {
    last: u32,
    looks: u32,
    left: u32,
    /// Looks are not counted down before this is set.
    gate: Arc<AtomicU32>,
}

impl Constraint for Late {
    fn mask(&mut self, allowed: &mut TokenMask) -> bool {
        assert_eq!(self.left, 0, "asked for a mask that is not there");
        (0..VOCAB as u32).filter(|id| id % 3 != self.last % 3).for_each(|id| allowed.allow(id));
        true
    }

    fn wait(&mut self, _most: Duration) -> bool {
        if self.left > 0 && self.gate.load(Ordering::Relaxed) > 0 {
            self.left -= 1;
        }
        self.left == 0
    }

    fn commit(&mut self, token: u32) -> Result<(), String> {
        assert_ne!(token % 3, self.last % 3, "it was masked");
        (self.last, self.left) = (token, (token * 7) % (self.looks + 1));
        Ok(())
    }

    fn fork(&self) -> Option<Box<dyn Constraint>> {
        Some(Box::new(Self { gate: Arc::clone(&self.gate), ..*self }))
    }
}

fn ask(looks: u32, gate: &Arc<AtomicU32>, sampling: SamplingParams) -> Request {
    let gate = Arc::clone(gate);
    let make = move |_| -> Box<dyn Constraint> {
        Box::new(Late { last: 0, looks, left: looks, gate: Arc::clone(&gate) })
    };
    Request { sampling, constraint: Some(Box::new(make)), ..request(stem(1, 300), 60) }
}

#[test]
fn late_masks_change_no_text() {
    let open = Arc::new(AtomicU32::new(1));
    for sampling in [SamplingParams::greedy(), SamplingParams::default()] {
        let mut plain = None;
        for (looks, proposals) in [(0, 0), (1, 0), (5, 0), (0, 4), (1, 4), (5, 4)] {
            let draft_length = DraftLength::Fixed(proposals);
            let mut bench =
                Bench::drafting(2048, 256, &EngineConfig { draft_length, ..EngineConfig::default() });
            let answer = bench.ask(ask(looks, &open, sampling.clone()));
            let tokens = answer.tokens(0);
            assert_eq!(tokens.len(), 60);
            assert_eq!(&tokens, plain.get_or_insert_with(|| tokens.clone()), "{looks} looks, {proposals}");
            bench.assert_balanced();
        }
    }
}

#[test]
fn others_go_on_while_a_mask_is_made() {
    let gate = Arc::new(AtomicU32::new(0));
    let mut bench = Bench::new(2048, 256, &EngineConfig::default());
    let mut late = bench.submit(ask(3, &gate, SamplingParams::greedy())).expect("good");
    bench.turns(20);
    // Beside it, and with it alone in the engine before.
    let other = bench.ask(Request { sampling: SamplingParams::greedy(), ..request(stem(2, 40), 50) });
    assert_eq!(other.tokens(0).len(), 50);
    gate.store(1, Ordering::Relaxed);
    let late = bench.finish(&mut late);
    let open = Arc::new(AtomicU32::new(1));
    let plain = Bench::new(2048, 256, &EngineConfig::default()).ask(ask(0, &open, SamplingParams::greedy()));
    assert_eq!(late.tokens(0), plain.tokens(0));
    bench.assert_balanced();
}

#[test]
fn who_leaves_while_a_mask_is_made_gives_the_slot_back() {
    let gate = Arc::new(AtomicU32::new(0));
    let mut bench = Bench::new(2048, 256, &EngineConfig::default());
    let late = bench.submit(ask(3, &gate, SamplingParams::greedy())).expect("good");
    bench.turns(10);
    drop(late);
    bench.run();
    bench.assert_balanced();
}
