//! Arguments about other nodes, shared by the commands that compute.

use clap::Args;

use crate::nodes::NodeChoice;

/// Whom prompts are handed to.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Node options")]
pub struct NodeUseArgs {
    /// Have prompts read by other nodes where that is sooner: names of `muser node list` with commas between them, or `off`;
    /// without a value all that are known (--nodes=NAME, with the equals sign). They see the prompts that they are asked for
    #[arg(long, value_name = "NAME,...|off", num_args = 0..=1, require_equals = true, default_value = "off", default_missing_value = "all")]
    pub nodes: String,
}

impl NodeUseArgs {
    /// Which nodes.
    pub fn choice(&self) -> NodeChoice {
        NodeChoice::from_flag(&self.nodes)
    }
}
