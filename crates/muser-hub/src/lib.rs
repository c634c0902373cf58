//! Model downloads: resumable, verified, atomic; the local model store.
//!
//! [`Source::parse`] understands what the user typed, [`pull`] brings it into a [`ModelStore`]. Nothing here knows what
//! a model file contains: a file is a name, a size and a SHA-256.

mod ask;
mod beginning;
mod catalog;
mod connect;
mod digest;
mod durable;
mod error;
#[doc(hidden)]
pub mod fuzzing;
mod head;
mod headers;
mod http;
mod part;
mod progress;
mod pull;
mod source;
mod store;
mod url;

pub use ask::{Asker, Place};
pub use beginning::{Beginning, beginning};
pub use catalog::{CATALOG, DEFAULT_NAME, KnownFile, Role, by_content, by_name};
pub use connect::Proxies;
pub use digest::Sha256;
pub use error::HubError;
pub use http::Token;
pub use progress::{Phase, Progress};
pub use pull::{OnProgress, PullOptions, Pulled, pull};
pub use source::{DEFAULT_BASE, Expected, Hub, Source};
pub use store::{ModelStore, StoredModel, Verified};
pub use url::Url;
