//! The planner's question and its answer.

use muser_backend::{KvType, LayerRange};

use crate::expect::{self, Placed};
use crate::place::{Choice, Load};
use crate::refuse::{self, NoPlan};
use crate::{Device, Expected, ModelSize};

/// Least context that is offered where a smaller one is allowed.
const LEAST_CONTEXT: u32 = 2048;

/// A figure that is wanted, and whether less will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The figure.
    pub value: u32,
    /// It was asked for: rather nothing than less.
    pub fixed: bool,
}

impl Asked {
    /// Asked for by a person.
    pub fn fixed(value: u32) -> Self {
        Self { value, fixed: true }
    }

    /// What is usual.
    pub fn usual(value: u32) -> Self {
        Self { value, fixed: false }
    }
}

/// What is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    /// Positions of a sequence.
    pub context: Asked,
    /// Sequences with so many positions at the same time.
    pub parallel: Asked,
    /// How K and V are stored.
    pub kv: KvType,
    /// Bytes of a draft model.
    pub draft: u64,
}

/// A part of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartPlan {
    /// Number of the device in the list that was given.
    pub device: usize,
    /// Its layers.
    pub range: LayerRange,
    /// Bytes of weights, embedding table and draft included.
    pub weights: u64,
    /// Bytes of K and V.
    pub kv: u64,
    /// Bytes of working memory.
    pub scratch: u64,
    /// Bytes that are free then, the reserve not counted.
    pub left: u64,
}

impl PartPlan {
    /// Bytes of all.
    pub fn bytes(&self) -> u64 {
        self.weights + self.kv + self.scratch
    }
}

/// Which layers go where, and what is expected of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// In the order of the layers.
    pub parts: Vec<PartPlan>,
    /// Positions of a sequence.
    pub context: u32,
    /// Sequences with so many positions.
    pub parallel: u32,
    /// How K and V are stored.
    pub kv: KvType,
    /// Bytes of weights that memory does not hold: the processor's part is read from the file again and again.
    pub from_file: u64,
    /// Rates.
    pub expected: Expected,
    /// What would change it, in words.
    pub change: String,
}

/// Plans for devices in this order, all of which get layers: so many where a number is given. `spare` is the processor, which may be
/// named in what would fit.
///
/// # Errors
/// [`NoPlan`] with what is missing, and what would fit.
pub fn plan(
    model: &ModelSize,
    devices: &[(Device, Option<usize>)],
    spare: Option<&Device>,
    wish: &Wish,
) -> Result<Plan, Box<NoPlan>> {
    let order = devices.iter().enumerate();
    let order = order.map(|(number, (device, count))| Choice { number, device, count: *count }).collect();
    let question = Question { model, orders: vec![order], all: true, wish: *wish };
    question.answer().ok_or_else(|| Box::new(refuse::reasons(&question, spare)))
}

/// Plans for some of these devices in the best order.
///
/// # Errors
/// [`NoPlan`] with what is missing, and what would fit.
pub fn plan_auto(model: &ModelSize, devices: &[Device], wish: &Wish) -> Result<Plan, Box<NoPlan>> {
    let question = Question { model, orders: orders(devices), all: false, wish: *wish };
    question.answer().ok_or_else(|| Box::new(refuse::reasons(&question, None)))
}

/// Orders that may be best: with the processor first it keeps the embedding table, of which a token reads one row, out of the
/// cards' memory; last it would read the vocabulary matrix.
fn orders(devices: &[Device]) -> Vec<Vec<Choice<'_>>> {
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
    fn answer(&self) -> Option<Plan> {
        let mut plan = self.search()?;
        plan.change = refuse::change(self, &plan);
        Some(plan)
    }

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
        let load = Load { model: self.model, context, sequences, kv, draft };
        let best = self.orders.iter().filter_map(|order| load.best(order, self.all));
        // The first of equals.
        let (_, parts) = best.reduce(|a, b| if b.0 < a.0 { b } else { a })?;
        Some(write_down(&load, &parts))
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

fn write_down(load: &Load<'_>, parts: &[Placed<'_>]) -> Plan {
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
        kv: load.kv,
        from_file,
        expected: expect::of(load.model, parts, load.kv),
        change: String::new(),
    }
}
