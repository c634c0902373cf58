//! A server of the user's own that is asked for small documents again and again, with a key that goes to nobody else.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::connect::Proxies;
use crate::error::HubError;
use crate::http::{Client, Limits, Token};
use crate::url::Url;

/// How long a server may take to be connected to, and to say something.
const PATIENCE: Duration = Duration::from_secs(5);

/// Where the server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// At an address; below its path, if it has one.
    Url(Url),
    /// Behind a Unix socket.
    Socket(PathBuf),
}

impl Place {
    /// From `http://…`, `https://…`, `unix:PATH` or a path; the error says in words what is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text.strip_prefix("unix:") {
            Some("") => Err("unix: needs the path of a socket".to_owned()),
            Some(path) => Ok(Self::Socket(path.into())),
            None if text.starts_with('/') => Ok(Self::Socket(text.into())),
            None => Url::parse(text).map(Self::Url),
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Url(url) => url.fmt(f),
            Self::Socket(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Asks one server.
pub struct Asker {
    client: Client,
    base: Url,
}

impl Asker {
    /// `key` is shown to this server only, and only where nobody can read it on the way; `extra_roots` is a PEM file of
    /// authorities to trust besides the built-in ones.
    pub fn new(
        place: &Place,
        key: Option<Token>,
        proxies: Proxies,
        extra_roots: Option<&Path>,
    ) -> Result<Self, HubError> {
        let (base, socket) = match place {
            Place::Url(url) => (url.clone(), None),
            Place::Socket(path) => {
                let here = Url::parse("http://localhost")
                    .map_err(|why| HubError::BadName { given: "localhost".to_owned(), why })?;
                (here, Some(path.clone()))
            }
        };
        let limits = Limits { connect: PATIENCE, stall: PATIENCE };
        let client = Client::new(limits, base.clone(), key, proxies, extra_roots)?.behind(socket);
        Ok(Self { client, base })
    }

    /// Status and body of a GET; `path` is below the server's address and may have a query. A body beyond `most_bytes` is an
    /// error.
    pub async fn get(&self, path: &str, most_bytes: usize) -> Result<(u16, Vec<u8>), HubError> {
        let url = self.base.with_path(path);
        let mut reply = self.client.get(&url, &[]).await?;
        let mut body = Vec::new();
        while let Some(piece) = reply.next(body.len() as u64).await? {
            if body.len() + piece.len() > most_bytes {
                return Err(HubError::Network {
                    host: url.authority(),
                    what: format!("expected an answer of at most {most_bytes} bytes, found more"),
                });
            }
            body.extend_from_slice(&piece);
        }
        Ok((reply.status.as_u16(), body))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// Answers one request with `answer` and gives back what was asked.
    async fn once<S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin>(
        mut stream: S,
        answer: &str,
    ) -> String {
        let mut seen = vec![0; 4096];
        let n = stream.read(&mut seen).await.expect("a request");
        stream.write_all(answer.as_bytes()).await.expect("written");
        String::from_utf8_lossy(&seen[..n]).into_owned()
    }

    fn asker(place: &str) -> Asker {
        let place = Place::parse(place).expect("a place");
        Asker::new(&place, Token::new("secret"), Proxies::default(), None).expect("a client")
    }

    const ANSWER: &str = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello";

    #[tokio::test]
    async fn a_document_comes_with_the_key_shown() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("binds");
        let address = listener.local_addr().expect("bound");
        let asker = asker(&format!("http://{address}/some/path/"));
        for (most, is_whole) in [(5, true), (4, false)] {
            let answered = async { once(listener.accept().await.expect("a connection").0, ANSWER).await };
            let (found, seen) = tokio::join!(asker.get("v1/x?since=3", most), answered);
            assert!(seen.starts_with("GET /some/path/v1/x?since=3 HTTP/1.1\r\n"), "{seen}");
            assert!(seen.to_ascii_lowercase().contains("authorization: bearer secret\r\n"), "{seen}");
            assert_eq!(found.ok(), is_whole.then(|| (200, b"hello".to_vec())));
        }
    }

    #[tokio::test]
    async fn a_key_does_not_go_over_a_network_in_the_clear() {
        // An address of documentation: nothing is sent, because the key is looked at first or the connection fails.
        let found = asker("http://192.0.2.1:9").get("x", 10).await;
        assert!(found.is_err());
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn a_socket_is_a_place_too() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("s");
        let listener = tokio::net::UnixListener::bind(&path).expect("binds");
        let asker = asker(&format!("unix:{}", path.display()));
        let answered = async { once(listener.accept().await.expect("a connection").0, ANSWER).await };
        let (found, seen) = tokio::join!(asker.get("v1/x", 100), answered);
        assert!(seen.starts_with("GET /v1/x HTTP/1.1\r\n"), "{seen}");
        assert_eq!(found.expect("an answer"), (200, b"hello".to_vec()));
        drop(listener);
        std::fs::remove_file(&path).expect("removed");
        let gone = asker.get("v1/x", 100).await.expect_err("nobody is there").to_string();
        assert!(gone.contains("failed"), "{gone}");
    }

    #[test]
    fn places_in_words() {
        for (text, shown) in [
            ("http://127.0.0.1:8080", "http://127.0.0.1:8080/"),
            ("https://host/llm/", "https://host/llm/"),
            ("unix:/run/m.sock", "unix:/run/m.sock"),
            ("/run/m.sock", "unix:/run/m.sock"),
        ] {
            assert_eq!(Place::parse(text).expect(text).to_string(), shown);
        }
        for wrong in ["", "127.0.0.1:8080", "unix:", "ftp://x", "http://a b"] {
            assert!(Place::parse(wrong).is_err(), "{wrong}");
        }
    }
}
