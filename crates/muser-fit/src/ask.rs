//! The planner's doors.

use crate::place::Choice;
use crate::plan::{Plan, Wish};
use crate::question::{Question, orders};
use crate::refuse::{self, NoPlan};
use crate::{Device, ModelSize};

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
    answer(&question).ok_or_else(|| Box::new(refuse::reasons(&question, spare)))
}

/// Plans for some of these devices in the best order.
///
/// # Errors
/// [`NoPlan`] with what is missing, and what would fit.
pub fn plan_auto(model: &ModelSize, devices: &[Device], wish: &Wish) -> Result<Plan, Box<NoPlan>> {
    let question = Question { model, orders: orders(devices), all: false, wish: *wish };
    answer(&question).ok_or_else(|| Box::new(refuse::reasons(&question, None)))
}

fn answer(question: &Question<'_>) -> Option<Plan> {
    let mut plan = question.search()?;
    plan.change = refuse::change(question, &plan);
    Some(plan)
}
