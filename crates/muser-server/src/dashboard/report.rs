//! The answer of `GET /v1/dashboard`, written by the server and read by `muser top`.
//!
//! Fields are only ever added within a version; whoever reads passes over what it does not know.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::figures::Mark;

/// The version of the shape.
pub const VERSION: u32 = 1;

type Text = Cow<'static, str>;

/// Everything.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// [`VERSION`].
    pub version: u32,
    /// The server.
    pub server: ServerPart,
    /// The model.
    pub model: ModelPart,
    /// Figures of now.
    pub figures: Vec<FigurePart>,
    /// What each slot does.
    pub slots: Marked<SlotPart>,
    /// Refused requests by status and code.
    pub errors: Marked<ErrorPart>,
    /// The draft's proposals by place; empty without a draft.
    pub draft: Marked<DraftPart>,
    /// Nodes that are known; empty where there are none.
    pub nodes: Marked<NodePart>,
    /// The past hour.
    pub history: HistoryPart,
}

/// A list, and where its figures come from.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Marked<T> {
    /// Where they come from.
    pub mark: Mark,
    /// The list.
    pub list: Vec<T>,
}

/// The server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ServerPart {
    /// Its version.
    pub version: Text,
    /// `ready`, `stopping` or `lost` (the device is gone).
    pub state: Text,
    /// Why it is lost.
    #[serde(default)]
    pub reason: Option<String>,
    /// Backend and device in words.
    pub device: String,
    /// When the model was loaded, in seconds since 1970: another value is another history.
    pub started: u64,
    /// Seconds since then.
    pub uptime_s: u64,
}

/// The model.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ModelPart {
    /// Its name.
    pub name: String,
    /// Name of the quantisation.
    pub quantization: String,
    /// Tokens that one request's context holds.
    pub context_tokens: usize,
}

/// One figure.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FigurePart {
    /// Its name.
    pub id: Text,
    /// What it is shown with.
    pub group: Text,
    /// Its name on a screen.
    pub label: Text,
    /// The value; `null` where there is none.
    pub value: Option<f64>,
    /// Its unit.
    pub unit: Text,
    /// Where it comes from.
    pub mark: Mark,
    /// The span.
    pub over: Text,
    /// One sentence.
    pub what: Text,
}

/// One slot.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SlotPart {
    /// Its number.
    pub id: usize,
    /// `idle`, `reading`, `writing`; `busy` where sizes are their owner's business.
    pub state: Text,
    /// Prompt tokens; this and what follows is 0 where sizes are not shown.
    pub prompt_tokens: usize,
    /// Prompt tokens that are in the cache.
    pub processed_tokens: usize,
    /// Prompt tokens that were reused.
    pub cached_tokens: usize,
    /// Tokens written.
    pub generated_tokens: usize,
}

/// Refused requests of one kind.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ErrorPart {
    /// The status.
    pub status: u16,
    /// The code.
    pub code: Text,
    /// In the last hour.
    pub last_hour: u64,
    /// Since the start.
    pub total: u64,
    /// Seconds since the last one.
    pub seconds_ago: u64,
}

/// A place in drafts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DraftPart {
    /// From 1.
    pub place: usize,
    /// Accepted proposals there by verified drafts, since the start.
    pub accepted_share: f64,
}

/// Another node.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct NodePart {
    /// Its name here.
    pub name: String,
    /// Is there a connection?
    pub connected: bool,
    /// `ready`, or why it is not asked: `unreachable`, `no_prompts`, `unlike`, `unproven`, `aside`, `draining`.
    #[serde(default)]
    pub state: String,
    /// Does it read prompts for us?
    pub reads_for_us: bool,
    /// Round trip in seconds.
    #[serde(default)]
    pub round_trip_s: Option<f64>,
    /// Bytes a second while something came.
    #[serde(default)]
    pub bytes_per_s: Option<f64>,
    /// Prompts that come from it now.
    pub fetching: usize,
    /// Prompts that go to it now.
    pub giving: usize,
    /// The last thing that went wrong.
    #[serde(default)]
    pub fault: Option<String>,
}

/// The past hour.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HistoryPart {
    /// Seconds of a row.
    pub interval_s: u64,
    /// Rows that are kept.
    pub length: usize,
    /// Number of the first row here.
    pub first: u64,
    /// Number of the newest row of all.
    pub newest: u64,
    /// What stands in a row.
    pub columns: Vec<ColumnPart>,
    /// The rows, oldest first.
    pub rows: Vec<Vec<Option<f64>>>,
}

/// One column.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ColumnPart {
    /// Its name.
    pub id: Text,
    /// Its name on a screen.
    pub label: Text,
    /// Its unit.
    pub unit: Text,
    /// Where it comes from.
    pub mark: Mark,
}
