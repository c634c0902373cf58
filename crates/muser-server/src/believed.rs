//! Which hosts and web pages are believed where no key protects the server.
//!
//! A browser is a program of this machine that strangers write scripts for. Two things tell their requests apart: the
//! `Origin` of a page, and the `Host` that a browser was told to ask for. The second one matters because a stranger's name
//! may be made to point here (DNS rebinding), and then the page is of the same origin: such requests carry no `Origin`, but
//! the stranger's name. An address or `localhost` cannot be made to mean another machine, and other names the operator names.

use std::net::IpAddr;

use axum::http::request::Parts;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, Method, Uri, header};

use crate::config::ServerConfig;
use crate::error::{ApiError, ServerError};

/// Endings of names that only the own network can resolve: no stranger can register them.
const PRIVATE_ENDINGS: [&str; 5] = [".local", ".internal", ".home.arpa", ".lan", ".test"];

/// What is believed without a key.
#[derive(Debug, Clone, Default)]
pub struct Believed {
    /// Names given by the operator, in lower case.
    hosts: Vec<String>,
    any_host: bool,
    /// Whether names that only the own network resolves are fine: the server listens for that network.
    private_names: bool,
    /// Origins given by the operator, as browsers write them.
    origins: Vec<String>,
    any_origin: bool,
}

impl Believed {
    /// From the operator's words; says which of them means nothing.
    pub fn new(config: &ServerConfig) -> Result<Self, ServerError> {
        let mut believed =
            Self { private_names: config.insecure && config.reaches_others(), ..Self::default() };
        for given in &config.allowed_hosts {
            if given == "*" {
                believed.any_host = true;
                continue;
            }
            let name = host_of(given).filter(|_| !given.contains(['/', '*']));
            let name = name.ok_or_else(|| {
                ServerError::Config(format!(
                    "'{given}' is not a host name; expected a name such as muser.example, or * for any"
                ))
            })?;
            believed.hosts.push(name);
        }
        for given in &config.cors_origins {
            if given == "*" {
                believed.any_origin = true;
            } else {
                let origin = normal_origin(given).map_err(|why| {
                    ServerError::Config(format!("'{given}' is not an origin that a browser sends: {why}"))
                })?;
                believed.origins.push(origin);
            }
        }
        Ok(believed)
    }

    /// Refuses what a stranger's page may have sent. Only for servers without a key.
    pub fn check(&self, method: &Method, uri: &Uri, headers: &HeaderMap) -> Result<(), ApiError> {
        // HTTP/2 and absolute targets name the host in the target, HTTP/1 in a header; a request may do both.
        let named = headers.get_all(header::HOST).iter().map(|value| value.to_str().unwrap_or("?"));
        for authority in uri.authority().map(Authority::as_str).into_iter().chain(named) {
            if !self.host(authority) {
                return Err(ApiError::foreign_host());
            }
        }
        if self.page(method, uri, headers) { Ok(()) } else { Err(ApiError::foreign_origin()) }
    }

    fn host(&self, authority: &str) -> bool {
        let Some(host) = host_of(authority) else { return self.any_host };
        self.any_host
            || is_local(&host)
            || host.parse::<IpAddr>().is_ok()
            || self.hosts.contains(&host)
            || (self.private_names
                && (!host.contains('.') || PRIVATE_ENDINGS.iter().any(|ending| host.ends_with(ending))))
    }

    /// Programs send no `Origin`; pages do, but for plain GETs, where newer browsers say how far away the page is.
    fn page(&self, method: &Method, uri: &Uri, headers: &HeaderMap) -> bool {
        let text = |name: &str| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
        let Some(origin) = text("origin") else {
            // Following a link is harmless: the page that holds the link does not see what comes.
            let link = *method == Method::GET && text("sec-fetch-dest") == Some("document");
            return text("sec-fetch-site") != Some("cross-site") || link;
        };
        let own = uri.authority().map(Authority::as_str).or(text("host"));
        self.origin(origin) || own.is_some_and(|own| is_same(origin, own))
    }

    /// Whether pages of `origin` may call without a key: those of this machine, and those that the operator named.
    pub fn origin(&self, origin: &str) -> bool {
        let local = origin.split_once("://").and_then(|(_, authority)| host_of(authority));
        self.listed(origin) || local.is_some_and(|host| is_local(&host))
    }

    /// Whether the operator named this origin.
    pub fn listed(&self, origin: &str) -> bool {
        self.any_origin || self.origins.iter().any(|listed| listed.eq_ignore_ascii_case(origin))
    }

    /// Whether the operator named any origin.
    pub fn any_listed(&self) -> bool {
        self.any_origin || !self.origins.is_empty()
    }

    /// Whether pages of all origins may call.
    pub fn every_origin(&self) -> bool {
        self.any_origin
    }

    /// Whether a page's preflight may be answered: `keyed` servers know those that the operator named.
    pub fn may_read(&self, origin: &str, request: &Parts, keyed: bool) -> bool {
        if keyed { self.listed(origin) } else { self.origin(origin) && self.host_of_request(request) }
    }

    fn host_of_request(&self, request: &Parts) -> bool {
        request.headers.get(header::HOST).is_none_or(|host| self.host(host.to_str().unwrap_or("?")))
    }
}

/// The host of an authority in lower case, without port, brackets, zone and final dot; nothing if it is none.
fn host_of(authority: &str) -> Option<String> {
    let (host, rest) = match authority.strip_prefix('[') {
        Some(inner) => inner.split_once(']')?,
        None => authority.split_at(authority.find(':').unwrap_or(authority.len())),
    };
    let port = rest.strip_prefix(':').unwrap_or(rest);
    if !port.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let host = host.split('%').next().unwrap_or_default();
    let host = host.strip_suffix('.').unwrap_or(host);
    let fits = |b: u8| b.is_ascii_alphanumeric() || b"-._:".contains(&b);
    (!host.is_empty() && host.bytes().all(fits)).then(|| host.to_ascii_lowercase())
}

fn is_local(host: &str) -> bool {
    host == "localhost"
        || host.ends_with(".localhost")
        || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Whether an origin is the one that is being asked: the same host and port.
fn is_same(origin: &str, authority: &str) -> bool {
    origin.split_once("://").is_some_and(|(scheme, rest)| {
        let with_port = |text: &str| {
            let default = if scheme == "https" { "443" } else { "80" };
            let bare = text.rsplit_once(':').is_none_or(|(_, port)| port.contains(']'));
            if bare { format!("{text}:{default}") } else { text.to_owned() }.to_ascii_lowercase()
        };
        // A proxy that ends TLS may pass the name on without its port, and the origin never has the usual one.
        rest.eq_ignore_ascii_case(authority) || with_port(rest) == with_port(authority)
    })
}

/// An origin as browsers write it: scheme, host and a port that is not the scheme's own.
fn normal_origin(given: &str) -> Result<String, String> {
    let Some((scheme, authority)) = given.split_once("://") else {
        return Err("expected a scheme and a host such as https://ui.example".to_owned());
    };
    if let Some((origin, _)) = authority.split_once(['/', '?', '#']) {
        return Err(format!("it has no path; write {scheme}://{origin}"));
    }
    let plain =
        !scheme.is_empty() && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b));
    if !plain || authority.contains('*') || host_of(authority).is_none() {
        return Err(
            "expected scheme://host or scheme://host:port; patterns are not known, * alone means any".into(),
        );
    }
    let scheme = scheme.to_ascii_lowercase();
    let usual = match scheme.as_str() {
        "https" => ":443",
        "http" => ":80",
        _ => "",
    };
    let authority = authority.strip_suffix(usual).unwrap_or(authority).to_ascii_lowercase();
    Ok(format!("{scheme}://{authority}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::{HeaderName, HeaderValue};

    fn believed(hosts: &[&str], origins: &[&str], address: &str) -> Believed {
        let own = |list: &[&str]| list.iter().map(ToString::to_string).collect();
        let config = ServerConfig {
            address: address.parse().expect("address"),
            insecure: true,
            allowed_hosts: own(hosts),
            cors_origins: own(origins),
            ..ServerConfig::default()
        };
        Believed::new(&config).expect("valid")
    }

    fn check(believed: &Believed, uri: &str, headers: &[(&'static str, &str)], expected: Option<&str>) {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(HeaderName::from_static(name), HeaderValue::from_str(value).expect("value"));
        }
        let outcome = believed.check(&Method::GET, &uri.parse().expect("a target"), &map);
        assert_eq!(outcome.err().and_then(|fault| fault.code), expected, "{uri} {headers:?}");
    }

    const HOST: Option<&str> = Some("host_not_allowed");
    const ORIGIN: Option<&str> = Some("origin_not_allowed");

    #[test]
    fn a_strangers_name_is_not_believed() {
        let here = believed(&["muser.example"], &[], "127.0.0.1:1");
        for fine in [
            "127.0.0.1:8080",
            "localhost",
            "LOCALHOST:1",
            "localhost.",
            "[::1]:9",
            "[::1]",
            "192.168.1.4:80",
            "[fe80::1%eth0]:1",
            "app.localhost",
            "muser.example:443",
            "Muser.Example.",
        ] {
            check(&here, "/", &[("host", fine)], None);
        }
        for wrong in [
            "attacker.example",
            "attacker.example:8080",
            "localhost.evil.example",
            "127.0.0.1.evil.example:80",
            "evil-localhost",
            "x.muser.example",
            "localhost:80@evil.example",
            "",
            "[::1",
            "localhost:8o",
            "mybox",
            "mybox.local",
            "127.0.0.1/../x",
        ] {
            check(&here, "/", &[("host", wrong)], HOST);
        }
        // No browser leaves it out; old programs do. Both ways to name it count.
        check(&here, "/", &[], None);
        check(&here, "http://evil.example/", &[("host", "localhost")], HOST);
        check(&here, "http://localhost/", &[("host", "evil.example")], HOST);
        check(&here, "/", &[("host", "localhost"), ("host", "evil.example")], HOST);
    }

    #[test]
    fn on_a_network_its_own_names_are_believed() {
        let network = believed(&[], &[], "0.0.0.0:1");
        for fine in ["mybox:8080", "mybox.local", "muser.internal", "mybox.lan", "10.0.0.7"] {
            check(&network, "/", &[("host", fine)], None);
        }
        check(&network, "/", &[("host", "attacker.example")], HOST);
        check(&believed(&["*"], &[], "0.0.0.0:1"), "/", &[("host", "attacker.example")], None);
    }

    #[test]
    fn only_local_named_and_own_pages_may_call() {
        let here = believed(&["muser.example"], &["https://ui.example:443", "app://shell"], "127.0.0.1:1");
        let local = ("host", "localhost:8080");
        for fine in [
            "http://127.0.0.1:8080",
            "http://localhost:3000",
            "http://[::1]:9",
            "https://ui.example",
            "app://shell",
        ] {
            check(&here, "/", &[local, ("origin", fine)], None);
        }
        for wrong in [
            "https://evil.example",
            "http://localhost.evil.example",
            "http://127.0.0.1.evil.example:80",
            "null",
            "",
            "http://ui.example",
            "https://ui.example:8443",
            "http://192.168.1.4",
        ] {
            check(&here, "/", &[local, ("origin", wrong)], ORIGIN);
        }
        check(&here, "/", &[("host", "muser.example"), ("origin", "https://muser.example")], None);
        check(&here, "/", &[("host", "192.168.1.4:80"), ("origin", "http://192.168.1.4")], None);
        check(&here, "/", &[("host", "192.168.1.4:81"), ("origin", "http://192.168.1.4")], ORIGIN);
        check(&here, "/", &[local, ("sec-fetch-site", "cross-site")], ORIGIN);
        check(&here, "/", &[local, ("sec-fetch-site", "cross-site"), ("sec-fetch-dest", "document")], None);
        check(&here, "/", &[local, ("sec-fetch-site", "same-site")], None);
    }

    #[test]
    fn wrong_words_are_refused_at_start() {
        let refused = |config: ServerConfig| Believed::new(&config).is_err();
        for wrong in [
            "ui.example",
            "https://ui.example/",
            "https://ui.example/path",
            "null",
            "https://*.ui.example",
            "",
            "https://",
            "https://u:p@ui.example",
            "://x",
            "https://ui.example:port",
        ] {
            assert!(
                refused(ServerConfig { cors_origins: vec![wrong.into()], ..ServerConfig::default() }),
                "{wrong}"
            );
        }
        for wrong in ["https://ui.example", "a/b", "", "*.example", "a b", "host:x"] {
            assert!(
                refused(ServerConfig { allowed_hosts: vec![wrong.into()], ..ServerConfig::default() }),
                "{wrong}"
            );
        }
    }
}
