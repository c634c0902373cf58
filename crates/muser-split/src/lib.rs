//! A model over several devices: [`SplitExecutor`] is one executor made of parts ([`muser_backend::PartExecutor`]), each with a
//! range of the layers, on any backends in any order.
//!
//! All exact backends compute the same bits, so where the cuts are never shows: what goes over one is the residual stream in f32
//! ([`muser_backend::Crossing`]), and a block of K and V is that of the whole model, whoever holds its pieces.
//!
//! Parts have memory, graphs, threads and self-tests of their own. A step goes through them one after the other; a step of many
//! rows may be cut into groups that follow each other through the parts, so that the parts work at the same time. That pays where
//! a part's time grows with its rows (prompts; many sequences on a processor) and costs where it does not (a few sequences on a
//! device that reads its weights once for all of them, and would read them once a group), so it is measured ([`Grouping`]).

mod blocks;
mod executor;
mod faculties;
mod groups;
mod pace;
mod part;
mod pipeline;
mod renewing;

pub use executor::SplitExecutor;
pub use pace::Grouping;
pub use renewing::{Renew, RenewingExecutor};
