//! A TCP connection to a host that may have several addresses, some of them dead, and may be behind a proxy.
//!
//! Addresses are tried a quarter of a second after one another, kinds in turn, and the first connection that stands is
//! taken (RFC 8305): a network whose IPv6 goes nowhere costs 250 ms and not the whole time limit. Proxies come from the usual
//! environment variables; `https` goes through a tunnel (`CONNECT`), so the proxy sees names and no content.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use base64::Engine as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::error::HubError;
use crate::url::Url;

/// Time that an address has before the next one is tried beside it.
const NEXT_AFTER: Duration = Duration::from_millis(250);

/// Longest head of a proxy's answer.
const MAX_HEAD_BYTES: usize = 16 << 10;

/// Connects to whichever address of `host` answers first.
pub(crate) async fn connect(host: &str, port: u16) -> io::Result<TcpStream> {
    let found = tokio::net::lookup_host((host, port)).await?;
    connect_any(found.collect()).await
}

async fn connect_any(addresses: Vec<SocketAddr>) -> io::Result<TcpStream> {
    let mut waiting = in_turn(addresses).into_iter();
    let mut trying = JoinSet::new();
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    loop {
        if let Some(address) = waiting.next() {
            trying.spawn(TcpStream::connect(address));
        } else if trying.is_empty() {
            return Err(last);
        }
        // A refusal is an answer: then the next one is tried at once.
        let more = waiting.len() > 0;
        tokio::select! {
            Some(outcome) = trying.join_next() => match outcome {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(error)) => last = error,
                Err(_) => {}
            },
            () = sleep(NEXT_AFTER), if more => {}
        }
    }
}

/// The addresses as the system sorted them, but the kinds in turn.
fn in_turn(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let Some(first) = addresses.first().copied() else { return addresses };
    let (same, other): (Vec<_>, Vec<_>) =
        addresses.into_iter().partition(|address| address.is_ipv6() == first.is_ipv6());
    let (mut same, mut other) = (same.into_iter(), other.into_iter());
    let mut out = Vec::new();
    loop {
        let before = out.len();
        out.extend(same.next());
        out.extend(other.next());
        if out.len() == before {
            return out;
        }
    }
}

/// The proxies of the environment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Proxies {
    http: Option<Proxy>,
    https: Option<Proxy>,
    /// Hosts that are asked directly.
    direct: Vec<String>,
}

#[derive(Clone, PartialEq, Eq)]
struct Proxy {
    host: String,
    port: u16,
    /// Value of `Proxy-Authorization`.
    credentials: Option<String>,
}

impl std::fmt::Debug for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// How to reach an address.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Way<'a> {
    Direct,
    Through { host: &'a str, port: u16, credentials: Option<&'a str> },
}

impl Proxies {
    /// As `variable` gives them: `HTTPS_PROXY`, `HTTP_PROXY` (in small letters only, see below), `ALL_PROXY`, `NO_PROXY`.
    pub fn from_env(variable: impl Fn(&str) -> Option<String>) -> Result<Self, HubError> {
        let proxy = |names: &[&str]| {
            let set = names
                .iter()
                .find_map(|name| Some((*name, variable(name).filter(|text| !text.trim().is_empty())?)));
            set.map(|(name, text)| {
                Proxy::parse(text.trim()).map_err(|why| HubError::BadProxy { variable: name.to_owned(), why })
            })
            .transpose()
        };
        // Servers that run programs set HTTP_PROXY from a header of strangers, so only the small spelling counts there.
        let http = proxy(&["http_proxy", "all_proxy", "ALL_PROXY"])?;
        let https = proxy(&["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"])?;
        let direct = variable("no_proxy").or_else(|| variable("NO_PROXY")).unwrap_or_default();
        let direct =
            direct.split(',').map(|host| host.trim().to_ascii_lowercase()).filter(|host| !host.is_empty());
        Ok(Self { http, https, direct: direct.collect() })
    }

    pub(crate) fn way(&self, url: &Url) -> Way<'_> {
        let proxy = if url.is_https() { &self.https } else { &self.http };
        match proxy {
            Some(proxy) if !self.is_direct(url.host(), url.port()) => Way::Through {
                host: &proxy.host,
                port: proxy.port,
                credentials: proxy.credentials.as_deref(),
            },
            _ => Way::Direct,
        }
    }

    /// A rule is `*`, a name (which means its subdomains too), an address, or an address range; each may end in a port.
    fn is_direct(&self, host: &str, port: u16) -> bool {
        let address: Option<IpAddr> = host.parse().ok();
        if host == "localhost" || address.is_some_and(|address| address.is_loopback()) {
            return true;
        }
        self.direct.iter().any(|rule| {
            let (rule, wanted) = match rule.rsplit_once(':') {
                Some((name, digits)) if !name.contains(':') || name.ends_with(']') => {
                    (name, digits.parse().ok())
                }
                _ => (rule.as_str(), None),
            };
            let rule = rule
                .trim_start_matches('[')
                .trim_end_matches(']')
                .trim_start_matches("*.")
                .trim_start_matches('.');
            let same_port = wanted.is_none_or(|wanted: u16| wanted == port);
            let same_host = rule == "*"
                || host == rule
                || host.strip_suffix(rule).is_some_and(|rest| rest.ends_with('.'))
                || address.is_some_and(|address| in_range(address, rule));
            same_port && same_host
        })
    }
}

/// Whether an address lies in `10.0.0.0/8` or the like.
fn in_range(address: IpAddr, range: &str) -> bool {
    let Some((base, bits)) = range.split_once('/') else { return false };
    let (Ok(base), Ok(bits)) = (base.parse::<IpAddr>(), bits.parse::<u32>()) else { return false };
    let same = |a: u128, b: u128, width: u32| bits <= width && (bits == 0 || (a ^ b) >> (width - bits) == 0);
    match (address, base) {
        (IpAddr::V4(a), IpAddr::V4(b)) => same(u128::from(a.to_bits()), u128::from(b.to_bits()), 32),
        (IpAddr::V6(a), IpAddr::V6(b)) => same(a.to_bits(), b.to_bits(), 128),
        _ => false,
    }
}

impl Proxy {
    fn parse(text: &str) -> Result<Self, String> {
        let rest = match text.split_once("://") {
            None => text,
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => rest,
            Some((scheme, _)) => return Err(format!("a proxy that speaks {scheme}")),
        };
        let (login, place) =
            rest.rsplit_once('@').map_or((None, rest), |(login, place)| (Some(login), place));
        let url = Url::parse(&format!("http://{}", place.trim_end_matches('/')))?;
        let credentials = login.map(|login| {
            let decoded = crate::url::decode_segment(login).unwrap_or_else(|| login.to_owned());
            format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(decoded))
        });
        let port = if place.trim_end_matches('/').ends_with(&format!(":{}", url.port())) {
            url.port()
        } else {
            1080
        };
        Ok(Self { host: url.host().to_owned(), port, credentials })
    }
}

/// Asks the proxy at the other end of `stream` for a tunnel to `url`'s host.
pub(crate) async fn tunnel(
    stream: &mut TcpStream,
    url: &Url,
    credentials: Option<&str>,
) -> Result<(), HubError> {
    let place = format!(
        "{}:{}",
        if url.host().contains(':') { format!("[{}]", url.host()) } else { url.host().to_owned() },
        url.port()
    );
    let mut head = format!("CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n");
    if let Some(credentials) = credentials {
        head.push_str("Proxy-Authorization: ");
        head.push_str(credentials);
        head.push_str("\r\n");
    }
    head.push_str("\r\n");
    let failed = |what: String| HubError::Network { host: url.authority(), what };
    stream.write_all(head.as_bytes()).await.map_err(|error| failed(format!("the proxy: {error}")))?;
    // Byte by byte: what follows the head belongs to the tunnel.
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        let byte = stream.read_u8().await.map_err(|error| failed(format!("the proxy: {error}")))?;
        answer.push(byte);
        if answer.len() > MAX_HEAD_BYTES {
            return Err(failed("the proxy's answer has no end".to_owned()));
        }
    }
    let line = String::from_utf8_lossy(&answer).lines().next().unwrap_or_default().to_owned();
    match line.split(' ').nth(1).and_then(|status| status.parse::<u16>().ok()) {
        Some(200..=299) => Ok(()),
        Some(407) => Err(HubError::BadProxy {
            variable: "https_proxy".to_owned(),
            why: "one that wants a login (http://USER:PASSWORD@HOST:PORT)".to_owned(),
        }),
        _ => Err(failed(format!("the proxy refuses: {}", line.trim()))),
    }
}

/// [`connect`], in time.
pub(crate) async fn connect_within(host: &str, port: u16, limit: Duration) -> io::Result<TcpStream> {
    timeout(limit, connect(host, port)).await.unwrap_or_else(|_| {
        let what = format!("no connection within {} s", limit.as_secs_f32());
        Err(io::Error::new(io::ErrorKind::TimedOut, what))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proxies(set: &[(&str, &str)]) -> Result<Proxies, HubError> {
        Proxies::from_env(|name| {
            set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    fn way(set: &[(&str, &str)], url: &str) -> Option<(String, u16, Option<String>)> {
        match proxies(set).expect("usable").way(&Url::parse(url).expect("a URL")) {
            Way::Direct => None,
            Way::Through { host, port, credentials } => {
                Some((host.to_owned(), port, credentials.map(str::to_owned)))
            }
        }
    }

    #[test]
    fn the_usual_variables_are_honoured() {
        let through = |host: &str, port| Some((host.to_owned(), port, None));
        let https = [("HTTPS_PROXY", "http://proxy:3128")];
        assert_eq!(way(&https, "https://hub.example/x"), through("proxy", 3128));
        assert_eq!(way(&https, "http://hub.example/x"), None);
        assert_eq!(way(&[("https_proxy", "proxy:3128/"), https[0]], "https://h/"), through("proxy", 3128));
        assert_eq!(way(&[("ALL_PROXY", "http://[::1]:9")], "http://h/"), through("::1", 9));
        assert_eq!(
            way(&[("HTTP_PROXY", "http://proxy:1")], "http://h/"),
            None,
            "it may be a stranger's header"
        );
        assert_eq!(way(&[("http_proxy", "http://proxy")], "http://h/"), through("proxy", 1080));
        let login = way(&[("https_proxy", "http://us%40er:pa:ss@proxy:1")], "https://h/").expect("through");
        assert_eq!(login.2.as_deref(), Some("Basic dXNAZXI6cGE6c3M="));
        for wrong in ["socks5://proxy:1", "https://proxy:1", "http://", "http://proxy:x"] {
            assert!(proxies(&[("https_proxy", wrong)]).is_err(), "{wrong}");
        }
        assert!(
            !format!("{:?}", proxies(&[("https_proxy", "http://u:secret@p:1")]).expect("usable"))
                .contains("secret")
        );
        assert_eq!(way(&[("https_proxy", " ")], "https://h/"), None);
    }

    #[test]
    fn some_hosts_are_asked_directly() {
        let direct =
            |rules: &str, url: &str| way(&[("all_proxy", "p:1"), ("NO_PROXY", rules)], url).is_none();
        for (rules, url) in [
            ("hub.example", "https://hub.example/"),
            ("a, .hub.example", "https://cdn.hub.example/"),
            ("*.hub.example", "https://cdn.hub.example/"),
            ("hub.example:8443", "https://hub.example:8443/"),
            ("*", "https://any.example/"),
            ("10.0.0.0/8", "http://10.200.0.1/"),
            ("fd00::/8", "http://[fd12::1]/"),
            ("", "http://localhost:8080/"),
            ("", "http://127.0.0.1:8080/"),
            ("HUB.example", "https://hub.example/"),
        ] {
            assert!(direct(rules, url), "{rules} {url}");
        }
        for (rules, url) in [
            ("hub.example", "https://nothub.example/"),
            ("hub.example:8443", "https://hub.example/"),
            ("10.0.0.0/8", "http://11.0.0.1/"),
            ("10.0.0.0/99", "http://10.0.0.1/"),
            ("", "https://hub.example/"),
        ] {
            assert!(!direct(rules, url), "{rules} {url}");
        }
    }

    /// Row 59: an address that swallows everything costs a quarter of a second, one that refuses nothing.
    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn a_dead_address_does_not_hold_up_the_living() {
        let local = || SocketAddr::from(([127, 0, 0, 1], 0));
        let dead = tokio::net::TcpSocket::new_v4().expect("a socket");
        dead.bind(local()).expect("a port");
        let dead = dead.listen(1).expect("listens");
        let dead_address = dead.local_addr().expect("bound");
        // Its queue is filled, so that it answers nobody any more.
        let mut filling = Vec::new();
        while let Ok(stream) = timeout(Duration::from_millis(100), TcpStream::connect(dead_address)).await {
            filling.push(stream.expect("room"));
            assert!(filling.len() < 100, "the queue has no end");
        }
        let alive = tokio::net::TcpListener::bind(local()).await.expect("listens");
        let alive_address = alive.local_addr().expect("bound");
        let refused = {
            let gone = tokio::net::TcpListener::bind(local()).await.expect("listens");
            gone.local_addr().expect("bound")
        };
        let begun = std::time::Instant::now();
        let stream = connect_any(vec![dead_address, refused, alive_address]).await.expect("connects");
        assert_eq!(stream.peer_addr().expect("connected"), alive_address);
        assert!((200..2000).contains(&begun.elapsed().as_millis()), "{:?}", begun.elapsed());
        assert_eq!(
            connect_any(vec![refused]).await.expect_err("refused").kind(),
            io::ErrorKind::ConnectionRefused
        );
        assert!(connect_any(Vec::new()).await.is_err());
    }

    #[test]
    fn kinds_of_addresses_take_turns() {
        let parse = |list: &[&str]| {
            list.iter().map(|text| text.parse().expect("an address")).collect::<Vec<SocketAddr>>()
        };
        let sorted = parse(&["[::1]:1", "[::2]:1", "[::3]:1", "127.0.0.1:1"]);
        assert_eq!(in_turn(sorted), parse(&["[::1]:1", "127.0.0.1:1", "[::2]:1", "[::3]:1"]));
        assert_eq!(in_turn(Vec::new()), Vec::new());
    }
}
