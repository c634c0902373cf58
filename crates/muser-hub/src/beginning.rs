//! The first bytes of a file, for whoever wants to know what is in it before it is here.

use hyper::StatusCode;
use hyper::header;

use crate::error::HubError;
use crate::headers::{content_length, content_range};
use crate::http::Client;
use crate::pull::{PullOptions, protocol, status_error};
use crate::source::{Hub, Source};

/// The first bytes of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Beginning {
    /// As many as were asked for, or all.
    pub bytes: Vec<u8>,
    /// Bytes of the whole file.
    pub total: u64,
}

/// Fetches the first `most` bytes of a file. Keeps nothing, checks no hash: what they say may be said to people, and nothing more.
/// Blocks; runs its own single-threaded I/O loop.
///
/// # Errors
/// The hub's, and [`HubError::Offline`] with `options.offline`.
pub fn beginning(
    hub: &Hub,
    source: &Source,
    options: &PullOptions,
    most: u64,
) -> Result<Beginning, HubError> {
    if options.offline {
        return Err(HubError::Offline { name: source.file_name.clone(), dir: std::path::PathBuf::new() });
    }
    let client = options.client(hub)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(HubError::io(std::path::Path::new("")))?;
    runtime.block_on(fetch(&client, source, options, most))
}

async fn fetch(
    client: &Client,
    source: &Source,
    options: &PullOptions,
    most: u64,
) -> Result<Beginning, HubError> {
    let range = format!("bytes=0-{}", most.max(1) - 1);
    let mut reply = client.get(&source.url, &[(header::RANGE, range)]).await?;
    let total = match reply.status {
        // A server that knows no ranges sends all of it, of which the rest is not read.
        StatusCode::OK => content_length(&reply.headers),
        StatusCode::PARTIAL_CONTENT => {
            let range = content_range(&reply.headers);
            let from_start = range.filter(|range| range.bytes.is_some_and(|(first, _)| first == 0));
            let Some(range) = from_start else {
                return Err(protocol(&reply, "bytes from 0 on", "another Content-Range".to_owned()));
            };
            range.total
        }
        _ => return Err(status_error(&reply, options)),
    };
    let Some(total) = total.or(reply.facts.linked_size) else {
        return Err(protocol(&reply, "the size of the file", "none".to_owned()));
    };
    let wanted = most.min(total);
    let mut bytes = Vec::new();
    while (bytes.len() as u64) < wanted {
        let Some(more) = reply.next(bytes.len() as u64).await? else {
            return Err(HubError::Truncated {
                host: reply.url.authority(),
                expected: wanted,
                found: bytes.len() as u64,
            });
        };
        bytes.extend_from_slice(&more);
    }
    bytes.truncate(wanted as usize);
    Ok(Beginning { bytes, total })
}
