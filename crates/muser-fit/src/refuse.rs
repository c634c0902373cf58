//! What is missing where nothing fits, what would fit, and what would change a plan that does.

use std::fmt;

use muser_backend::{KvType, LayerRange};

use crate::place::{Choice, Load};
use crate::plan::Asked;
use crate::question::Question;
use crate::words::gigabytes;
use crate::{Device, Plan};

/// Least difference of a rate that is worth a word.
const WORTH: f64 = 1.03;
/// Plans that are named where nothing fits.
const MOST_WAYS: usize = 3;

/// A device that has less than it needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// What `--devices` calls it, or all of them.
    pub device: String,
    /// Bytes that it would have to have free, its reserve not counted.
    pub needed: u64,
    /// Bytes that it has.
    pub has: u64,
}

/// A plan that would fit.
#[derive(Clone, Debug, PartialEq)]
pub struct Way {
    /// What to ask for.
    pub ask: String,
    /// What comes of it.
    pub plan: Plan,
}

/// Nothing fits.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NoPlan {
    /// Numbers of layers that cannot be.
    pub layers: Option<String>,
    /// Where memory is missing.
    pub shortages: Vec<Shortage>,
    /// The nearest plans that fit.
    pub ways: Vec<Way>,
}

impl fmt::Display for NoPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts: Vec<String> = self.layers.iter().cloned().collect();
        parts.extend(self.shortages.iter().map(|short| {
            let missing = gigabytes(short.needed.saturating_sub(short.has));
            let (needed, has) = (gigabytes(short.needed), gigabytes(short.has));
            format!("{} would need {needed} and has {has}: {missing} are missing", short.device)
        }));
        if parts.is_empty() {
            parts.push("the layers cannot be shared out like that".into());
        }
        if self.ways.is_empty() {
            parts.push("no smaller plan fits either".into());
        }
        for Way { ask, plan } in &self.ways {
            parts.push(format!("{ask} would fit, at {:.1} tok/s", plan.expected.one));
        }
        f.write_str(&parts.join("; "))
    }
}

impl std::error::Error for NoPlan {}

pub(crate) fn reasons(question: &Question<'_>, spare: Option<&Device>) -> NoPlan {
    let layers = miscounted(question);
    let shortages = if layers.is_some() { Vec::new() } else { shortages(question) };
    NoPlan { layers, shortages, ways: ways(question, spare) }
}

/// Numbers of layers that do not add up.
fn miscounted(question: &Question<'_>) -> Option<String> {
    if !question.all {
        return None;
    }
    let layers = question.model.layers.len();
    let devices = question.devices();
    let counted: usize = devices.iter().filter_map(|choice| choice.count).sum();
    let open = devices.iter().filter(|choice| choice.count.is_none()).count();
    let possible = if open == 0 { counted == layers } else { counted + open <= layers };
    (!possible).then(|| match open {
        0 => format!("{counted} layers are shared out, the model has {layers}"),
        _ => format!("{counted} layers and one for each of {open} other devices, the model has {layers}"),
    })
}

fn shortages(question: &Question<'_>) -> Vec<Shortage> {
    let wish = question.wish;
    let load = Load {
        model: question.model,
        context: wish.context.value,
        sequences: wish.parallel.value,
        kv: wish.kv,
        draft: wish.draft,
        streams: question.streams(),
    };
    let layers = question.model.layers.len();
    let devices = question.devices();
    let mut found = Vec::new();
    // Where all numbers up to a device are given its layers are known.
    let mut first = 0;
    for choice in devices.iter().filter(|_| question.all) {
        let Some(range) = choice.count.and_then(|count| LayerRange::new(first..first + count, layers)) else {
            break;
        };
        first = range.end();
        if load.place(*choice, range).is_none() {
            let needed = load.needs(choice.device, range).sum();
            found.push(Shortage { device: choice.device.id.clone(), needed, has: Load::room(choice.device) });
        }
    }
    if found.is_empty() {
        let whole = load.needs(devices[0].device, LayerRange::whole(layers));
        let scratch: u64 =
            devices.iter().map(|c| c.device.scratch(question.model, c.device.rows(false))).sum();
        let needed = whole.weights + whole.kv + scratch;
        let ids: Vec<&str> = devices.iter().map(|choice| choice.device.id.as_str()).collect();
        let has = devices.iter().map(|choice| Load::room(choice.device)).sum();
        // Whole layers may not fill what there is, in which case the figures alone would not say it.
        found.push(Shortage { device: ids.join(" and "), needed: needed.max(has), has });
    }
    found
}

/// The nearest questions that have an answer.
fn ways(question: &Question<'_>, spare: Option<&Device>) -> Vec<Way> {
    let mut ways = Vec::new();
    let mut ask = |words: &str, other: Question<'_>| {
        if ways.len() < MOST_WAYS
            && let Some(plan) = other.search()
        {
            ways.push(Way { ask: words.replace("CTX", &plan.context.to_string()), plan });
        }
    };
    let uncounted = |question: &Question<'_>| -> bool {
        question.orders.iter().flatten().all(|choice| choice.count.is_none())
    };
    if !uncounted(question) {
        let mut other = question.clone();
        other.orders.iter_mut().flatten().for_each(|choice| choice.count = None);
        ask("the same devices without numbers of layers", other);
    }
    let has_processor = question.devices().iter().any(|choice| choice.device.is_processor());
    if let Some(spare) = spare.filter(|_| !has_processor) {
        let mut other = question.clone();
        for order in &mut other.orders {
            order.iter_mut().for_each(|choice| choice.count = None);
            order.insert(0, Choice { number: usize::MAX, device: spare, count: None });
        }
        ask(&format!("{} before the others", spare.id), other);
    }
    if question.wish.kv == KvType::Int16 {
        ask("--kv 8", eight(question));
    }
    if question.wish.parallel.value > 1 {
        let mut other = question.clone();
        other.wish.parallel = Asked::fixed(1);
        ask("--parallel 1", other);
    }
    if question.wish.context.fixed {
        ask("--ctx CTX", shorter(question));
        if question.wish.kv == KvType::Int16 {
            ask("--ctx CTX --kv 8", shorter(&eight(question)));
        }
    }
    ways
}

/// The same with keys and values of 8 bits.
fn eight<'a>(question: &Question<'a>) -> Question<'a> {
    let mut other = question.clone();
    other.wish.kv = KvType::Int8;
    other
}

/// The same with a context that may be shorter.
fn shorter<'a>(question: &Question<'a>) -> Question<'a> {
    let mut other = question.clone();
    other.wish.context = Asked::usual(question.wish.context.value);
    other
}

/// What would change a plan, in words.
pub(crate) fn change(question: &Question<'_>, plan: &Plan) -> String {
    let mut found = Vec::new();
    // The same with other figures; a plan with less than was wanted is compared with one that has as little.
    let with = |kv: KvType, context: u32| {
        let mut other = question.clone();
        other.wish.kv = kv;
        other.wish.context = Asked::fixed(context);
        other.wish.parallel = Asked::fixed(plan.parallel);
        other.search()
    };
    let mut tell = |ask: String, other: Option<Plan>| {
        let other = other.filter(|other| other.expected.one > WORTH * plan.expected.one);
        found.extend(other.map(|other| format!("{ask} {:.1} tok/s", other.expected.one)));
    };
    if plan.kv == KvType::Int16 {
        tell("--kv 8:".into(), with(KvType::Int8, plan.context));
    }
    let half = plan.context / 2;
    if half >= 1024 {
        tell(format!("--ctx {half}:"), with(plan.kv, half));
    }
    if let Some((id, more, rate)) = more_memory(question, plan) {
        found.push(format!("{} more on {id}, which would hold all of it: {rate:.1} tok/s", gigabytes(more)));
    }
    if plan.context < question.wish.context.value || plan.parallel < question.wish.parallel.value {
        let (context, parallel) = (question.wish.context.value, question.wish.parallel.value);
        found.push(format!("there was no room for {parallel} x {context} positions"));
    }
    if found.is_empty() {
        return "a faster device; neither memory, nor --kv, nor --ctx".into();
    }
    found.join("; ")
}

/// What the fastest device lacks to hold the whole model, and what it would reach.
fn more_memory(question: &Question<'_>, plan: &Plan) -> Option<(String, u64, f64)> {
    let mut other = question.clone();
    let devices = other.devices();
    let faster = devices.iter().filter(|choice| !choice.device.is_processor());
    let best = faster.reduce(|a, b| if b.device.read > a.device.read { b } else { a })?;
    let whole = LayerRange::whole(question.model.layers.len());
    let load = Load {
        model: question.model,
        context: plan.context,
        sequences: plan.parallel,
        kv: plan.kv,
        draft: question.wish.draft,
        streams: false,
    };
    let more =
        load.needs(best.device, whole).sum().checked_sub(Load::room(best.device)).filter(|n| *n > 0)?;
    let larger = Device { free: best.device.free + more, ..best.device.clone() };
    other.orders = vec![vec![Choice { number: 0, device: &larger, count: None }]];
    other.wish.context = Asked::fixed(plan.context);
    other.wish.parallel = Asked::fixed(plan.parallel);
    let rate = other.search()?.expected.one;
    (rate > WORTH * plan.expected.one).then(|| (best.device.id.clone(), more, rate))
}
