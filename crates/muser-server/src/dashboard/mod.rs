//! What the person who runs the server looks at: `/dashboard`, `muser top`, and the one JSON route of both.
//!
//! Every figure is an entry of a table ([`FIGURES`], [`COLUMNS`]) with its unit, its span and its mark: *measured*, *derived* or
//! *estimated*. The answer, `docs/api.md` and both screens are made from these tables, so none of them can show a figure without
//! saying where it comes from. Nothing here knows a prompt or an answer.
//!
//! The past is a ring of totals, one every [`INTERVAL`], of fixed size ([`History`]); whatever happened between two of them is a
//! subtraction.

mod clocks;
mod digest;
mod errors;
mod figures;
mod history;
mod machine;
mod page;
mod report;

pub use clocks::Clocks;
pub use digest::{Counts, Digest};
pub use errors::{ErrorCount, Errors};
pub use figures::{COLUMNS, Column, FIGURES, Figure, Mark, View};
pub use history::{Board, History, INTERVAL, LENGTH, Totals, Window};
pub use machine::{Bandwidth, Machine};
pub use page::describe;
pub use report::{
    ColumnPart, DraftPart, ErrorPart, FigurePart, HistoryPart, Marked, ModelPart, NodePart, Report,
    ServerPart, SlotPart, VERSION,
};
