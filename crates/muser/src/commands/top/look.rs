//! One look at a server, and in words why nothing was seen.

use std::fmt;

use anyhow::{Result, anyhow};
use muser_hub::{Asker, HubError, Place, Proxies, Token};
use muser_server::dashboard::{Report, VERSION};

use crate::cli::TopArgs;
use crate::env_vars;
use crate::output::{HintExt as _, usage_error};

/// An hour of a hundred columns would be smaller.
const MOST_BYTES: usize = 8 << 20;

/// Looks at one server.
pub struct Look {
    asker: Asker,
    place: Place,
}

/// Why there is nothing to see.
#[derive(Debug)]
pub enum Trouble {
    /// It may pass.
    Passing(String),
    /// It will not, unless somebody does something.
    Lasting(anyhow::Error),
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passing(why) => f.write_str(why),
            Self::Lasting(error) => error.fmt(f),
        }
    }
}

impl Look {
    /// At the server that the arguments name, with the key that they or the environment name.
    pub fn new(args: &TopArgs) -> Result<Self> {
        let place =
            Place::parse(&args.url).map_err(|why| usage_error(format!("--url {}: {why}", args.url)))?;
        let text = |name: &str| std::env::var(name).ok().filter(|text| !text.trim().is_empty());
        let roots = text(env_vars::SSL_CERT_FILE).map(std::path::PathBuf::from);
        let asker = Asker::new(&place, key(args, text)?, Proxies::from_env(text)?, roots.as_deref())?;
        Ok(Self { asker, place })
    }

    /// Where the server is.
    pub fn place(&self) -> String {
        self.place.to_string()
    }

    /// What the server says, and of its past the rows after `since`.
    pub async fn ask(&mut self, since: u64) -> Result<Report, Trouble> {
        let body = self.body(since).await?;
        let lasting = |why: String| Trouble::Lasting(anyhow!("{}: {why}", self.place));
        // The version first: a later one may have any shape.
        let value: serde_json::Value = serde_json::from_slice(&body).map_err(|error| {
            lasting(format!("expected JSON from /v1/dashboard, found something else ({error})"))
        })?;
        match value["version"].as_u64() {
            Some(version) if version == u64::from(VERSION) => {}
            found => {
                let found = found.map_or_else(|| "none".to_owned(), |version| version.to_string());
                return Err(lasting(format!(
                    "expected version {VERSION} of /v1/dashboard, found {found}; take the muser of the server"
                )));
            }
        }
        serde_json::from_value(value)
            .map_err(|error| lasting(format!("/v1/dashboard has another shape: {error}")))
    }

    /// The answer as it came.
    pub async fn body(&self, since: u64) -> Result<Vec<u8>, Trouble> {
        let found = self.asker.get(&format!("v1/dashboard?since={since}"), MOST_BYTES).await;
        let place = &self.place;
        let lasting = |message: String, hint: &str| {
            let hinted = Err::<(), _>(anyhow!(message)).hint(hint);
            Trouble::Lasting(hinted.err().unwrap_or_else(|| anyhow!("it failed")))
        };
        match found {
            Ok((200, body)) => Ok(body),
            Ok((401, _)) => Err(lasting(
                format!("{place}: the server wants a key, or another one"),
                "--key-file FILE, or MUSER_API_KEY",
            )),
            Ok((403, _)) => Err(lasting(
                format!("{place}: the server does not believe this host name"),
                "ask by address, or start it with --allowed-host",
            )),
            Ok((404, _)) => Err(lasting(
                format!("{place}: nothing is at /v1/dashboard there"),
                "is it muser, and not older than this one?",
            )),
            Ok((503, _)) => Err(Trouble::Passing(format!("{place}: the server is loading its model"))),
            Ok((status, _)) => {
                Err(Trouble::Passing(format!("{place}: the server answers with status {status}")))
            }
            Err(HubError::TokenInTheClear { .. }) => Err(lasting(
                format!("{place}: a key is not sent without TLS to another machine"),
                "use https, or a tunnel: ssh -L 8080:127.0.0.1:8080 HOST",
            )),
            Err(HubError::Tls { host, what }) => Err(lasting(
                format!("{host}: the certificate is not trusted: {what}"),
                "SSL_CERT_FILE names a PEM file with the authority that signed it",
            )),
            Err(error) => Err(Trouble::Passing(error.to_string())),
        }
    }
}

/// The first key of the file, or that of the environment.
fn key(args: &TopArgs, variable: impl Fn(&str) -> Option<String>) -> Result<Option<Token>> {
    let (from, text) = match &args.key_file {
        Some(path) => {
            let shown = path.display().to_string();
            let text =
                std::fs::read_to_string(path).map_err(|error| anyhow!("--key-file {shown}: {error}"))?;
            let first = first_key(&text).ok_or_else(|| anyhow!("--key-file {shown}: it holds no key"))?;
            (shown, first.to_owned())
        }
        None => match variable(env_vars::MUSER_API_KEY) {
            Some(key) => (env_vars::MUSER_API_KEY.to_owned(), key),
            None => return Ok(None),
        },
    };
    let key = Token::new(&text).ok_or_else(|| anyhow!("{from}: a key is printable ASCII without spaces"))?;
    Ok(Some(key))
}

fn first_key(text: &str) -> Option<&str> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    text.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('#'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_as_the_server_reads_them() {
        assert_eq!(first_key("\u{feff}# comment\r\n\n  alpha \nbeta\n"), Some("alpha"));
        assert_eq!(first_key("# none\n\n"), None);
    }
}
