//! The K and V of a prompt as an engine computes or has them, for whoever compares.

use std::collections::HashMap;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};

use muser_engine::{EngineHandle, Event, PrefixExport, PrefixOutlet, Request, SamplingParams};
use muser_handoff::{Place, Planes};
use muser_kv::{CacheScope, KvGroup};

use crate::landing::Block;

enum Said {
    Admitted(usize),
    Grown(PrefixExport),
}

struct Hearing(Mutex<Sender<Said>>);

impl Hearing {
    fn say(&self, said: Said) {
        let _ = self.0.lock().unwrap_or_else(PoisonError::into_inner).send(said);
    }
}

impl PrefixOutlet for Hearing {
    fn admitted(&mut self, known: usize) {
        self.say(Said::Admitted(known));
    }

    fn grown(&mut self, offer: PrefixExport) {
        self.say(Said::Grown(offer));
    }
}

/// What is wanted of a prompt's state.
pub(crate) struct Wanted<'a> {
    pub(crate) ids: &'a [u32],
    pub(crate) scope: CacheScope,
    /// What may be taken from memory, at most.
    pub(crate) most_reused: usize,
    /// What must be there, at least: what lacks would take too long.
    pub(crate) least_known: usize,
}

/// The blocks of a prompt; rows behind its end are zeros. `None` where the engine does not know as much as it should, or is
/// busy with something else.
pub(crate) fn blocks(engine: &EngineHandle, wanted: &Wanted<'_>) -> Option<HashMap<Block, Vec<u8>>> {
    let (say, hear) = channel();
    let request = Request {
        max_tokens: Some(0),
        sampling: SamplingParams::greedy(),
        priority: i32::MIN,
        outlet: Some(Box::new(Hearing(Mutex::new(say)))),
        for_peer: true,
        most_reused: Some(wanted.most_reused),
        scope: wanted.scope,
        ..Request::new(wanted.ids.to_vec(), Vec::new())
    };
    let mut submission = engine.submit(request).ok()?;
    let mut whole = None;
    let mut is_over = false;
    while !is_over {
        let event = submission.recv();
        is_over = event.is_none();
        for said in hear.try_iter() {
            match said {
                Said::Admitted(known) if known < wanted.least_known => return None,
                Said::Grown(offer) if offer.units().len() == wanted.ids.len() => whole = Some(offer),
                Said::Admitted(_) | Said::Grown(_) => {}
            }
        }
        if matches!(event, Some(Event::Failed(_))) {
            return None;
        }
    }
    let offer = whole?;
    let mut blocks = HashMap::new();
    for index in 0..offer.blocks() {
        for group in [KvGroup::Full, KvGroup::Sliding] {
            if offer.has(group, index) {
                let (bytes, result) = offer.copy_out_blocking(group, index, Vec::new());
                result.ok()?;
                blocks.insert((group, index), bytes);
            }
        }
    }
    Some(blocks)
}

/// The first place, in their order, whose rows are not those of a block. Rows that are nowhere count as others.
pub(crate) fn first_difference<'a>(
    planes: &Planes,
    came: impl Iterator<Item = (&'a Place, &'a [u8])>,
    here: &HashMap<Block, Vec<u8>>,
) -> Option<Place> {
    let differs = |(place, rows): &(&Place, &[u8])| {
        let layer = planes.layer_at(place.group, place.component, place.layer);
        let block = here.get(&(place.group, place.block as usize));
        let of_layer = block.zip(layer).and_then(|(block, layer)| block.get(layer));
        let Some((layer, plane)) = of_layer.zip(planes.plane(place.group, place.component)) else {
            return true;
        };
        let mut ours = Vec::new();
        plane.gather(layer, place.row_range(), &mut ours);
        ours != *rows
    };
    came.filter(differs).map(|(place, _)| *place).min()
}
