//! Arguments of `muser serve`.

use std::path::PathBuf;

use clap::Args;

use super::{DraftArgs, ModelArgs, NodeUseArgs, PackStoreArgs, Parallel, ProjectorArgs};

/// Arguments of `muser serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Address or host name to listen on, or a Unix socket (unix:PATH, or a path), which only its owner may open; beyond
    /// loopback a key file and TLS are needed, or --insecure
    #[arg(long, value_name = "ADDRESS|NAME|unix:PATH", default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    pub port: u16,
    /// File of keys, one a line; every route but /health and the page's own files then needs one of them
    #[arg(long, alias = "api-key-file", value_name = "FILE")]
    pub key_file: Option<PathBuf>,
    /// Certificate chain (PEM); needs --tls-key
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// Private key (PEM) of the certificate
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Listen beyond loopback without key or TLS: anyone who reaches the port may use it, or who reads along, if there is a key
    #[arg(long)]
    pub insecure: bool,
    /// Let all keys reuse each other's cached prompts and see each other's sessions, slots and packs: each can then find out
    /// what others have sent
    #[arg(long)]
    pub shared_cache: bool,
    /// Host name by which requests may call a server without a key, besides its addresses and localhost, or * for any (may be
    /// given several times)
    #[arg(long, value_name = "NAME")]
    pub allowed_host: Vec<String>,
    /// Origin that browsers may call from, such as <https://ui.example>, or * for any (may be given several times); default:
    /// none, without a key the pages of this machine
    #[arg(long, value_name = "ORIGIN")]
    pub cors_origin: Vec<String>,
    /// Name of the model in answers; default: from the file
    #[arg(long, aliases = ["alias", "served-model-name"], value_name = "NAME")]
    pub name: Option<String>,
    /// Answer 404 to requests for another model name, instead of taking any name
    #[arg(long)]
    pub strict_model: bool,
    /// Requests computed together: up to 256, or `auto`: as many as memory bears, on a CPU at most 16
    #[arg(long, value_name = "N|auto", default_value = "auto")]
    pub parallel: Parallel,
    /// Requests that may wait for a place before others get 429
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub queue: u32,
    /// Longest time to the next token of an answer that the reading of another prompt may cause, in ms, as far as it can be cut;
    /// default: 50 on a card, 300 on a CPU
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..))]
    pub itl_target: Option<u32>,
    /// Memory for keys and values in MiB; default: enough for all places, but at most what a card has left, on a CPU 4 GiB
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..))]
    pub kv_mib: Option<u64>,
    /// Host memory in MiB for keys and values that the device has no room for any more; worth it with --backend cuda
    #[arg(long, value_name = "MIB", default_value_t = 0)]
    pub kv_host_mib: u64,
    /// When the context is full let the oldest turns of a chat go (of plain text the older half) and write on, instead of
    /// ending the text; requests may say otherwise
    #[arg(long)]
    pub context_shift: bool,
    /// Keep prompts and answers in packs, so that they are not read again, also after a restart: a folder, or `off`; without
    /// a value the folder is `packs` in `MUSER_HOME`
    #[arg(long, value_name = "DIR|off", num_args = 0..=1, default_value = "off", default_missing_value = "default")]
    pub packs: PathBuf,
    /// Most output tokens for requests that name no limit; default: until the context is full
    #[arg(long, value_name = "TOKENS")]
    pub default_max_tokens: Option<u32>,
    /// Longest request body in MiB
    #[arg(long, value_name = "MIB", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..))]
    pub max_body_mib: u16,
    /// Memory for the bodies of all requests together in MiB
    #[arg(long, value_name = "MIB", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_bodies_mib: u32,
    /// Connections at once; beyond it the one that has been idle longest is closed
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_connections: u32,
    /// Connections of one address at once; default: half of --max-connections
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_connections_per_address: Option<u32>,
    /// Seconds that a connection may stay open between two requests; a proxy in front should have less
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u32).range(1..))]
    pub keep_alive: u32,
    /// Seconds that running requests have when the server is told to stop; 0 cuts them off
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub drain: u32,
    /// Read prompts for other nodes, too, which reach this one at this address; those that `muser node list` knows may ask
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub node_listen: Option<std::net::SocketAddr>,
    /// Logs as lines of JSON
    #[arg(long)]
    pub log_json: bool,
    /// Who reads prompts.
    #[command(flatten)]
    pub nodes: NodeUseArgs,
    /// How packs are kept.
    #[command(flatten)]
    pub pack_store: PackStoreArgs,
    /// Which model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Who proposes tokens.
    #[command(flatten)]
    pub draft: DraftArgs,
    /// What the model sees with.
    #[command(flatten)]
    pub projector: ProjectorArgs,
}
