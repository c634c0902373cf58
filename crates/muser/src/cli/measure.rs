//! Arguments of the commands that measure and reckon: `bench` and `cost`.

use clap::{Args, ValueEnum};

use muser_engine::DraftLength;

use super::{CompanionChoice, ModelArgs};

/// Arguments of `muser bench`.
#[derive(Clone, Debug, Args)]
pub struct BenchArgs {
    /// Prompt lengths (tests `ppN`)
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "128,512")]
    pub prompt: Vec<u32>,
    /// Tokens generated in each repetition of the other tests; 0 leaves these tests out
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub gen_tokens: u32,
    /// Positions before the generated tokens (tests `tg@D`, and depths of the rows tests)
    #[arg(long, value_name = "D,D", value_delimiter = ',', default_value = "0")]
    pub depth: Vec<u32>,
    /// Sequences that generate together, one row each (tests `rowsN@D`)
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    pub rows: Vec<u32>,
    /// Rows of one sequence in a step, as drafting verifies them (tests `draftN@D`)
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    pub draft_rows: Vec<u32>,
    /// Repetitions; the tests take turns in each
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub reps: u32,
    /// Compare decoding with and without this draft (DFlash) on twenty short texts: auto, off or a file
    #[arg(long, value_name = "auto|off|PATH", default_value = "off")]
    pub draft: CompanionChoice,
    /// Proposals in a round of that comparison; auto: as many as pay
    #[arg(long, value_name = "auto|N", default_value = "auto", value_parser = super::draft::length)]
    pub draft_len: DraftLength,
    /// Compare with a stand-in (synthetic): a draft of the real draft's cost whose proposals, taken from the known
    /// continuation, are right with this probability
    #[arg(long, value_name = "P", value_parser = share)]
    pub draft_accept: Option<f64>,
    /// Copy weights into the layout that kernels read fastest
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    pub repack: RepackChoice,
    /// Run another program's benchmark after each repetition and print ratios. It prints JSON of the same shape;
    /// {model}, {tests}, {threads} and {gen} in the command are replaced
    #[arg(long, value_name = "COMMAND")]
    pub compare: Option<String>,
    /// Drop the model while the other program runs, where memory does not hold both
    #[arg(long)]
    pub reload: bool,
    /// Write a receipt of this name into `receipts/` here if that folder exists, else into that of `~/.muser`
    #[arg(long, value_name = "NAME")]
    pub receipt: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Which model.
    #[command(flatten)]
    pub model: ModelArgs,
}

/// Copying of weights into another layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RepackChoice {
    /// If the copy fits into free memory
    Auto,
    /// Always
    On,
    /// Never
    Off,
}

/// Arguments of `muser cost`.
#[derive(Clone, Debug, Args)]
pub struct CostArgs {
    /// Model file (GGUF), or the name of a pulled one; default: the pulled model, else the bundled Muse Tiny
    #[arg(value_name = "MODEL")]
    pub model: Option<String>,
    /// Positions of one sequence
    #[arg(long, value_name = "N", default_value_t = 4096)]
    pub context: u64,
    /// Sequences at the same time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=4096))]
    pub slots: u64,
    /// Work out what an image of this size in pixels costs, too
    #[arg(long, value_name = "WIDTHxHEIGHT", value_parser = image_size)]
    pub image: Option<(u32, u32)>,
    /// Vision projector (mmproj, GGUF) that the image is for: auto takes one that lies beside the model
    #[arg(long, value_name = "auto|PATH", default_value = "auto", requires = "image")]
    pub mmproj: CompanionChoice,
    /// Most tokens that the image becomes
    #[arg(long, value_name = "TOKENS", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub image_max_tokens: u32,
    /// Threads that probe the memory; default: what the machine allows
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Do not measure the memory's bandwidth, leave out what depends on it
    #[arg(long)]
    pub no_probe: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

fn image_size(text: &str) -> Result<(u32, u32), String> {
    let sides =
        text.split_once(['x', 'X', '\u{d7}']).and_then(|(w, h)| Some((w.parse().ok()?, h.parse().ok()?)));
    match sides {
        Some((w, h)) if (1..=16_384).contains(&w) && (1..=16_384).contains(&h) => Ok((w, h)),
        _ => Err("expected width and height in pixels, 1 to 16384 each, such as 896x896".into()),
    }
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(value) if (0.0..=1.0).contains(&value) => Ok(value),
        _ => Err("expected a number from 0 to 1".into()),
    }
}
