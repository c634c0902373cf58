//! Arguments of `muser node`: who may read prompts for whom.

use clap::{Args, Subcommand};
use muser_handoff::{Rights, check_address};

use super::{DraftArgs, ModelArgs, NodeServeArgs, NodeTestArgs};

/// Arguments of `muser node`.
#[derive(Debug, Args)]
pub struct NodeArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: NodeCommand,
}

/// The commands on nodes.
#[derive(Debug, Subcommand)]
pub enum NodeCommand {
    /// Print a code with which one other node can enrol here, once, within ten minutes
    Invite(NodeInviteArgs),
    /// Enrol at the node that printed a code: each pins the other's key, and the bits of both are compared
    Add(NodeAddArgs),
    /// List the nodes that are known here, and what those that can be reached say of themselves
    List(NodeListArgs),
    /// Forget a node; what it is doing here ends within five seconds
    Remove(NodeRemoveArgs),
    /// Change this node's key: the nodes that know it are told under the present one, which goes when all of them know
    Rotate(NodeRotateArgs),
    /// Print this node's public key
    Key,
    /// Read prompts for other nodes, without a server for clients
    Serve(NodeServeArgs),
    /// Have a node read something that is read here, too, and compare every byte
    Test(NodeTestArgs),
}

/// Arguments of `muser node invite`.
#[derive(Clone, Copy, Debug, Args)]
pub struct NodeInviteArgs {
    /// What the node may ask for: `prefill` (prompts to be read here), `sessions`, or both with a comma
    #[arg(long, value_name = "RIGHTS", default_value = "prefill", value_parser = rights)]
    pub may: Rights,
}

/// Arguments of `muser node add`.
#[derive(Debug, Args)]
pub struct NodeAddArgs {
    /// What the node is called here
    pub name: String,
    /// Where it listens
    #[arg(value_name = "HOST:PORT", value_parser = address)]
    pub address: String,
    /// What `muser node invite` printed there; without it, the first line of standard input
    pub code: Option<String>,
    /// What the node may ask for here: `prefill`, `sessions`, or both with a comma; default: nothing
    #[arg(long, value_name = "RIGHTS", default_value = "", hide_default_value = true, value_parser = rights)]
    pub may: Rights,
    /// Do not have the node read something that is read here, too; the next server does
    #[arg(long)]
    pub no_canary: bool,
    /// What this node wants to be called there; default: this machine's name
    #[arg(long, value_name = "NAME")]
    pub own_name: Option<String>,
    /// Which model the two are to compute alike.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Who proposes tokens.
    #[command(flatten)]
    pub draft: DraftArgs,
}

/// Arguments of `muser node list`.
#[derive(Clone, Copy, Debug, Args)]
pub struct NodeListArgs {
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
    /// Do not ask the nodes, only print what is known here
    #[arg(long)]
    pub offline: bool,
}

/// Arguments of `muser node remove`.
#[derive(Debug, Args)]
pub struct NodeRemoveArgs {
    /// What the node is called here
    pub name: String,
}

/// Arguments of `muser node rotate`.
#[derive(Clone, Copy, Debug, Args)]
pub struct NodeRotateArgs {
    /// Use the next key from now on, though there are nodes that do not know it; they have to enrol anew
    #[arg(long)]
    pub now: bool,
}

fn rights(words: &str) -> Result<Rights, String> {
    Rights::parse(words).map_err(|error| error.to_string())
}

fn address(text: &str) -> Result<String, String> {
    check_address(text).map(|()| text.to_owned()).map_err(|error| error.to_string())
}
