//! How nodes are used.

use std::time::Duration;

/// When nodes are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preference {
    /// Where that is sooner than computing here.
    #[default]
    Soonest,
    /// Wherever there is one.
    Nodes,
}

/// How nodes are used.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// Names of those that may be asked; `None` for all that are known.
    pub only: Option<Vec<String>>,
    /// When.
    pub preference: Preference,
    /// Most nodes asked about one prompt.
    pub most_nodes: usize,
    /// Longest time spent asking.
    pub ask_for: Duration,
    /// A prompt that computing here takes no longer for is not asked about.
    pub least_local: Duration,
    /// Positions between two stages; each carries a window, so they are far apart.
    pub stage_every: u32,
    /// The longest hand-off, unless its request has less time.
    pub budget: Duration,
}

impl Default for NodeOptions {
    fn default() -> Self {
        Self {
            only: None,
            preference: Preference::Soonest,
            most_nodes: 8,
            ask_for: Duration::from_millis(50),
            least_local: Duration::from_millis(100),
            stage_every: 8192,
            budget: Duration::from_mins(10),
        }
    }
}
