//! Arguments of `muser fit`.

use clap::Args;
use muser_fit::parse_bytes;

use super::KvChoice;

/// Arguments of `muser fit`. Without a card and without sizes it is about this machine.
#[derive(Clone, Debug, Args)]
pub struct FitArgs {
    /// Model file (GGUF), the name of a pulled one, or what `muser pull` would fetch, of which only the header is read; default: the
    /// pulled model, else the released one
    #[arg(value_name = "MODEL")]
    pub model: Option<String>,
    /// Memory of the card, such as 12g, or `none` for a machine without one
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    pub memory: Option<Memory>,
    /// The card by name, such as "RTX 4090", for its rates and, without --memory, its size
    #[arg(long, value_name = "NAME")]
    pub card: Option<String>,
    /// Gigabytes a second that the card reads, in place of the known card's
    #[arg(long, value_name = "GB/s", value_parser = rate)]
    pub read: Option<f64>,
    /// Tera-operations a second of the card with dense 8-bit integers, in place of the known card's
    #[arg(long, value_name = "TOPS", value_parser = rate)]
    pub int8: Option<f64>,
    /// Memory of the processor, such as 32g
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub ram: Option<u64>,
    /// Gigabytes a second that the processor reads; default: 60, on this machine what is measured
    #[arg(long, value_name = "GB/s", value_parser = rate)]
    pub ram_read: Option<f64>,
    /// Positions that a sequence must have room for; default: up to 32768, fewer where that does not fit
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub ctx: Option<u32>,
    /// Sequences with so many positions at the same time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub parallel: u32,
    /// How keys and values are stored: 16 or 8 bits a value
    #[arg(long, value_name = "TYPE", default_value = "16")]
    pub kv: KvChoice,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// What `--memory` takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// No card.
    None,
    /// A card of so many bytes.
    Bytes(u64),
}

fn memory(text: &str) -> Result<Memory, String> {
    if text == "none" { Ok(Memory::None) } else { parse_bytes(text).map(Memory::Bytes) }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (0.1..=1e6).contains(&value) => Ok(value),
        _ => Err(format!("expected a number from 0.1 to 1000000, found `{text}`")),
    }
}
