//! Files that go with a model: a draft, a projector.

use std::convert::Infallible;
use std::path::PathBuf;
use std::str::FromStr;

/// Where a file that goes with the model comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CompanionChoice {
    /// One that lies beside the model, if any.
    Auto,
    /// None.
    Off,
    /// This file.
    File(PathBuf),
}

impl FromStr for CompanionChoice {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "auto" => Self::Auto,
            "off" => Self::Off,
            path => Self::File(path.into()),
        })
    }
}
