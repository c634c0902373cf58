//! The planner's question, and the best answer to it.

use crate::expect::{self, Placed};
use crate::place::{Choice, Load};
use crate::plan::{Asked, PartPlan, Plan, Wish};
use crate::{Device, ModelSize};

/// Least context that is offered where a smaller one is allowed.
const LEAST_CONTEXT: u32 = 2048;

/// Orders that may be best: with the processor first it keeps the embedding table, of which a token reads one row, out of the
/// cards' memory; last it would read the vocabulary matrix.
pub(crate) fn orders(devices: &[Device]) -> Vec<Vec<Choice<'_>>> {
    let some = |processor: bool| {
        let choices = devices.iter().enumerate();
        let choices = choices.map(|(number, device)| Choice { number, device, count: None });
        choices.filter(move |choice| choice.device.is_processor() == processor)
    };
    vec![some(true).chain(some(false)).collect(), some(false).chain(some(true)).collect()]
}

/// Model, devices and wish.
#[derive(Clone, Debug)]
pub(crate) struct Question<'a> {
    pub(crate) model: &'a ModelSize,
    /// Orders of the devices to choose from, never none.
    pub(crate) orders: Vec<Vec<Choice<'a>>>,
    /// Must all devices have layers?
    pub(crate) all: bool,
    pub(crate) wish: Wish,
}

impl<'a> Question<'a> {
    /// The best plan with what is wanted; with less where less is allowed and nothing else fits: fewer sequences first.
    pub(crate) fn search(&self) -> Option<Plan> {
        let least = LEAST_CONTEXT.min(self.model.geometry.context as u32);
        let contexts = falling(self.wish.context, least);
        contexts.into_iter().find_map(|context| {
            falling(self.wish.parallel, 1).into_iter().find_map(|n| self.with(context, n))
        })
    }

    /// The best plan with exactly so much.
    fn with(&self, context: u32, sequences: u32) -> Option<Plan> {
        let Wish { kv, draft, .. } = self.wish;
        let load = |streams| Load { model: self.model, context, sequences, kv, draft, streams };
        let loads = [load(false), load(true)];
        let loads = loads.iter().filter(|load| !load.streams || self.streams());
        let ways = loads.flat_map(|load| {
            self.orders.iter().filter_map(move |order| Some((load, load.best(order, self.all)?)))
        });
        // The first of equals.
        let (load, (seconds, parts)) = ways.reduce(|a, b| if b.1.0 < a.1.0 { b } else { a })?;
        Some(write_down(load, seconds, &parts))
    }

    /// Is there a processor, whose layers a card may compute in steps of many rows?
    pub(crate) fn streams(&self) -> bool {
        self.orders[0].iter().any(|choice| choice.device.is_processor())
    }

    /// Devices in the order that they were given.
    pub(crate) fn devices(&self) -> Vec<Choice<'a>> {
        let mut choices = self.orders[0].clone();
        choices.sort_by_key(|choice| choice.number);
        choices
    }
}

/// What is asked for, then halves of it, if less will do.
fn falling(asked: Asked, least: u32) -> Vec<u32> {
    let mut values = vec![asked.value];
    let mut value = asked.value;
    while !asked.fixed && value > least {
        value = (value / 2).max(least);
        values.push(value);
    }
    values
}

fn write_down(load: &Load<'_>, seconds: f64, parts: &[Placed<'_>]) -> Plan {
    let streams = parts.iter().any(|part| load.streams_to(part.device, part.range));
    let mut from_file = 0;
    let of = |part: &Placed<'_>| {
        let (needs, room) = (load.needs(part.device, part.range), Load::room(part.device));
        from_file += needs.sum().saturating_sub(room);
        PartPlan {
            device: part.number,
            range: part.range,
            weights: needs.weights,
            kv: needs.kv,
            scratch: needs.scratch,
            left: room.saturating_sub(needs.sum()),
        }
    };
    let written = parts.iter().map(of).collect();
    Plan {
        parts: written,
        context: load.context,
        parallel: load.sequences,
        rows: load.rows(parts) as u32,
        kv: load.kv,
        streams,
        seconds,
        from_file,
        expected: expect::of(load.model, parts, load.kv, streams.then_some(load.rows(parts))),
        change: String::new(),
    }
}
