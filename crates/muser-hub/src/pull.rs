//! Bringing one file: attempts over a resumable part until every byte is there and proven.
//!
//! An attempt asks for the bytes after those that are on disk (`Range` with `If-Range`) and believes nothing: the range
//! that comes must start where we stopped, the size and the identity must be those of the earlier bytes, the hash of the
//! whole must be the expected one. What does not fit is fetched again from zero, once; a file appears under its name
//! complete or not at all.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use hyper::StatusCode;
use hyper::header::{self, HeaderName};

use crate::catalog;
use crate::connect::Proxies;
use crate::digest::Sha256;
use crate::error::HubError;
use crate::head::{self, HEAD_BYTES};
use crate::headers::{content_length, content_range};
use crate::http::{Client, Facts, Limits, Reply, Token};
use crate::part::Part;
use crate::progress::{Meter, Phase, Progress};
use crate::source::{Hub, Source};
use crate::store::{ModelStore, StoredModel, Verified};

/// Bytes that stay free on the file system beside the file.
const SPACE_MARGIN_BYTES: u64 = 64 << 20;

/// How a pull behaves.
#[derive(Clone, Debug)]
pub struct PullOptions {
    /// Sent to the hub's own host only.
    pub token: Option<Token>,
    /// Use what is there, fetch nothing.
    pub offline: bool,
    /// Replace a different file of the same name.
    pub force: bool,
    /// Longest time for a connection, TLS included.
    pub connect_timeout: Duration,
    /// Longest time without a byte.
    pub stall_timeout: Duration,
    /// Attempts in a row that may bring nothing new.
    pub max_failures: u32,
    /// Wait after the first failure; doubles with each further one.
    pub backoff: Duration,
    /// Longest wait between two attempts, also when the server names one.
    pub max_wait: Duration,
    /// Proxies to go through.
    pub proxies: Proxies,
    /// PEM file with certificate authorities to trust besides the built-in ones.
    pub extra_roots: Option<PathBuf>,
}

impl PullOptions {
    /// What talks to a hub as these options say.
    pub(crate) fn client(&self, hub: &Hub) -> Result<Client, HubError> {
        Client::new(
            Limits { connect: self.connect_timeout, stall: self.stall_timeout },
            hub.base().clone(),
            self.token.clone(),
            self.proxies.clone(),
            self.extra_roots.as_deref(),
        )
    }
}

impl Default for PullOptions {
    fn default() -> Self {
        Self {
            token: None,
            offline: false,
            force: false,
            connect_timeout: Duration::from_secs(20),
            stall_timeout: Duration::from_secs(30),
            max_failures: 8,
            backoff: Duration::from_millis(500),
            max_wait: Duration::from_mins(2),
            proxies: Proxies::default(),
            extra_roots: None,
        }
    }
}

/// A file that is there.
#[derive(Clone, Debug)]
pub struct Pulled {
    /// Where it is and what is known of it.
    pub model: StoredModel,
    /// Was it there before?
    pub already_there: bool,
    /// Bytes that came over the network in this pull.
    pub fetched_bytes: u64,
    /// Bytes of an earlier pull that were used.
    pub resumed_bytes: u64,
}

/// Hears about progress; `Break` stops the pull, which keeps its bytes.
pub type OnProgress<'a> = dyn FnMut(&Progress) -> ControlFlow<()> + 'a;

/// Brings `source` into `store`. Blocks; runs its own single-threaded I/O loop.
pub fn pull(
    store: &ModelStore,
    hub: &Hub,
    source: &Source,
    options: &PullOptions,
    on_progress: &mut OnProgress<'_>,
) -> Result<Pulled, HubError> {
    std::fs::create_dir_all(store.dir()).map_err(HubError::io(store.dir()))?;
    if let Some(model) = already_there(store, source, options, on_progress)? {
        return Ok(Pulled { model, already_there: true, fetched_bytes: 0, resumed_bytes: 0 });
    }
    let total = source.expected.size;
    let part = Part::open(store.dir(), &source.file_name, &source.url.to_string(), &mut |bytes| {
        // Hashing a part cannot be stopped half-way; it takes seconds.
        let _ = on_progress(&Progress::new(Phase::Checking, bytes, total, 0.0));
    })?;
    let client = options.client(hub)?;
    let resumed_bytes = part.len();
    let job = Job {
        store,
        source,
        options,
        client,
        on_progress,
        meter: Meter::new(),
        told: None,
        best: part.len(),
        fetched_bytes: 0,
        resumed_bytes,
        ranges: true,
        head: Vec::new(),
        space_seen: 0,
        pieced: resumed_bytes > 0,
        part,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(HubError::io(store.dir()))?;
    runtime.block_on(job.run())
}

/// The stored file, when it is what `source` means.
fn already_there(
    store: &ModelStore,
    source: &Source,
    options: &PullOptions,
    on_progress: &mut OnProgress<'_>,
) -> Result<Option<StoredModel>, HubError> {
    let Some(model) = store.describe_file(&source.file_name).filter(|_| !options.force) else {
        return Ok(None);
    };
    let other =
        |expected: String, found: String| HubError::Exists { path: model.path.clone(), expected, found };
    let Some(expected) = source.expected.sha256 else {
        let proven = matches!(model.verified, Verified::Yes(_) | Verified::HashedOnly(_));
        let same_origin = model.url.as_deref() == Some(source.url.to_string().as_str());
        if proven && same_origin {
            return Ok(Some(model));
        }
        let origin = model.url.as_deref().unwrap_or("an unknown origin");
        return Err(other(
            format!("the file of {}", source.url),
            format!("{} bytes from {origin}", model.size),
        ));
    };
    if let Some(size) = source.expected.size.filter(|&size| size != model.size) {
        return Err(other(format!("{size} bytes"), format!("{} bytes", model.size)));
    }
    let found = match model.verified {
        Verified::Yes(sha256) | Verified::HashedOnly(sha256) => sha256,
        Verified::ChangedSince | Verified::No => {
            let sha256 = Sha256::of_file(&model.path, &mut |bytes| {
                let _ = on_progress(&Progress::new(Phase::Checking, bytes, Some(model.size), 0.0));
            })?;
            if sha256 == expected {
                store.record(&model.name, &sha256, true, Some(&source.url.to_string()))?;
            }
            sha256
        }
    };
    if found != expected {
        return Err(other(format!("SHA-256 {expected}"), found.to_string()));
    }
    Ok(store.describe_file(&source.file_name))
}

struct Job<'a> {
    store: &'a ModelStore,
    source: &'a Source,
    options: &'a PullOptions,
    client: Client,
    part: Part,
    on_progress: &'a mut OnProgress<'a>,
    meter: Meter,
    /// When progress was told last.
    told: Option<Instant>,
    /// Most bytes that were ever there: only beyond it an attempt counts as progress.
    best: u64,
    fetched_bytes: u64,
    resumed_bytes: u64,
    /// Does the server answer ranges properly?
    ranges: bool,
    /// The first bytes of the file, as far as they came in this attempt.
    head: Vec<u8>,
    /// Length at which free space was last looked at.
    space_seen: u64,
    /// Do the bytes come from more than one response?
    pieced: bool,
}

impl Job<'_> {
    async fn run(mut self) -> Result<Pulled, HubError> {
        let mut failures = 0;
        loop {
            let error = match self.attempt().await {
                Ok(()) => match self.check_hash() {
                    Ok(checked) => return self.finish(checked),
                    // Pieces of two contents may have met: the whole is fetched once more in one piece.
                    Err(_) if self.pieced => {
                        self.restart()?;
                        self.ranges = false;
                        continue;
                    }
                    Err(error) => {
                        self.part.delete()?;
                        return Err(error);
                    }
                },
                Err(error) => error,
            };
            if matches!(error, HubError::NotAModel { .. }) {
                self.part.delete()?;
                return Err(error);
            }
            self.part.checkpoint()?;
            if !error.is_transient() {
                return Err(error);
            }
            if self.part.len() > self.best {
                self.best = self.part.len();
                failures = 0;
            }
            failures += 1;
            if failures > self.options.max_failures {
                return Err(HubError::GaveUp { attempts: failures, last: Box::new(error) });
            }
            self.wait(failures, &error).await?;
        }
    }

    /// One request. `Ok` when all bytes are there.
    async fn attempt(&mut self) -> Result<(), HubError> {
        if self.part.len() > 0 && !self.ranges {
            self.restart()?;
        }
        if self.part.len() > 0 && self.total() == Some(self.part.len()) {
            return Ok(());
        }
        if self.options.offline {
            return Err(HubError::Offline {
                name: self.source.file_name.clone(),
                dir: self.store.dir().to_owned(),
            });
        }
        if self.total().is_some_and(|total| self.part.len() > total)
            || (self.part.len() > 0 && !self.can_resume())
        {
            self.restart()?;
        }
        let offset = self.part.len();
        self.tell(Phase::Connecting, true)?;
        let mut reply = self.client.get(&self.source.url, &self.range_headers(offset)).await?;
        let total = match reply.status {
            StatusCode::OK => {
                if offset > 0 {
                    // The server does not do ranges, or has another content now.
                    self.restart()?;
                }
                content_length(&reply.headers)
            }
            StatusCode::PARTIAL_CONTENT => match self.accept_range(&reply, offset) {
                Ok(total) => total,
                Err(error) => {
                    self.ranges = false;
                    return Err(error);
                }
            },
            StatusCode::RANGE_NOT_SATISFIABLE if offset > 0 => {
                // Our bytes are as many as the file has, or more: let the hash decide, or start again.
                self.ranges = false;
                if content_range(&reply.headers).is_some_and(|r| r.total == Some(offset))
                    && self.total().is_none()
                {
                    self.part.journal.size = Some(offset);
                    return Ok(());
                }
                return Err(status_error(&reply, self.options));
            }
            _ => return Err(status_error(&reply, self.options)),
        };
        if let Some(encoding) = reply
            .headers
            .get(header::CONTENT_ENCODING)
            .filter(|e| !e.as_bytes().eq_ignore_ascii_case(b"identity"))
        {
            return Err(protocol(&reply, "the plain bytes", format!("Content-Encoding {encoding:?}")));
        }
        self.adopt(&reply, total)?;
        if self.total().is_none() && !reply.headers.contains_key(header::TRANSFER_ENCODING) {
            // The end of the connection would be the end of the file, whatever ended it.
            return Err(protocol(&reply, "a Content-Length", "none".to_owned()));
        }
        self.check_space()?;
        self.pieced |= self.part.len() > 0;
        self.meter.reset();
        self.told = None;
        while let Some(bytes) =
            reply.next(self.part.len()).await.map_err(|e| self.name_truncation(&reply, e))?
        {
            let len = self.part.len() + bytes.len() as u64;
            if let Some(total) = self.total().filter(|&total| len > total) {
                self.ranges = false;
                return Err(protocol(&reply, &format!("{total} bytes"), "more".to_owned()));
            }
            self.look_at_head(&bytes, false)?;
            self.part.append(&bytes)?;
            if self.total().is_none() && self.part.len() - self.space_seen >= SPACE_MARGIN_BYTES / 2 {
                self.space_seen = self.part.len();
                self.check_space()?;
            }
            self.fetched_bytes += bytes.len() as u64;
            self.tell(Phase::Downloading, false)?;
        }
        match self.total() {
            Some(total) if self.part.len() < total => Err(HubError::Truncated {
                host: reply.url.authority(),
                expected: total,
                found: self.part.len(),
            }),
            _ => {
                if self.part.len() < HEAD_BYTES as u64 {
                    self.look_at_head(&[], true)?;
                }
                self.part.journal.size = Some(self.part.len());
                self.tell(Phase::Downloading, true)
            }
        }
    }

    /// Sees whether a model file begins, before more than its first bytes are kept. Bytes of an earlier attempt were seen then,
    /// unless they were fewer than it takes.
    fn look_at_head(&mut self, more: &[u8], all: bool) -> Result<(), HubError> {
        let have = self.part.len();
        if have >= HEAD_BYTES as u64 {
            return Ok(());
        }
        if self.head.len() as u64 != have {
            self.head = self.part.beginning(HEAD_BYTES)?;
        }
        let missing = HEAD_BYTES.saturating_sub(self.head.len()).min(more.len());
        self.head.extend_from_slice(&more[..missing]);
        let all = all || self.total() == Some(have + more.len() as u64);
        match head::fault(&self.head, all) {
            Some(found) => Err(HubError::NotAModel { url: self.source.url.to_string(), found }),
            None => Ok(()),
        }
    }

    /// Bytes of the whole file, as far as known.
    fn total(&self) -> Option<u64> {
        self.source.expected.size.or(self.part.journal.size)
    }

    /// The hash that the whole must have, as far as known.
    fn wanted_hash(&self) -> Option<Sha256> {
        let linked = self.part.journal.linked_etag.as_deref().and_then(Sha256::from_hex);
        self.source.expected.sha256.or(linked)
    }

    /// Without a validator or a final hash nobody would notice that two contents were glued together.
    fn can_resume(&self) -> bool {
        self.validator().is_some() || self.wanted_hash().is_some()
    }

    fn validator(&self) -> Option<&str> {
        let journal = &self.part.journal;
        journal.etag.as_deref().filter(|etag| !etag.starts_with("W/")).or(journal.last_modified.as_deref())
    }

    fn range_headers(&self, offset: u64) -> Vec<(HeaderName, String)> {
        let mut headers = Vec::new();
        if offset > 0 {
            headers.push((header::RANGE, format!("bytes={offset}-")));
            if let Some(validator) = self.validator() {
                headers.push((header::IF_RANGE, validator.to_owned()));
            }
        }
        headers
    }

    /// Checks that a 206 is the rest we asked for; returns the total it names.
    fn accept_range(&self, reply: &Reply, offset: u64) -> Result<Option<u64>, HubError> {
        let shown = reply
            .headers
            .get(header::CONTENT_RANGE)
            .and_then(|v| v.to_str().ok())
            .unwrap_or("none")
            .to_owned();
        let wrong = |expected: String| protocol(reply, &expected, format!("Content-Range {shown}"));
        let want = format!("bytes from {offset} on");
        let Some(range) = content_range(&reply.headers) else { return Err(wrong(want)) };
        let Some((first, last)) = range.bytes else { return Err(wrong(want)) };
        if offset == 0 || first != offset || last < first || range.total.is_some_and(|total| last >= total) {
            return Err(wrong(want));
        }
        if let (Some(known), Some(total)) = (self.total(), range.total)
            && known != total
        {
            return Err(wrong(format!("a file of {known} bytes")));
        }
        if content_length(&reply.headers).is_some_and(|len| len != last - first + 1) {
            return Err(protocol(
                reply,
                &format!("{} bytes", last - first + 1),
                "another Content-Length".to_owned(),
            ));
        }
        Ok(range.total)
    }

    /// Takes over what the server says of the file, after comparing it with what is known.
    fn adopt(&mut self, reply: &Reply, total: Option<u64>) -> Result<(), HubError> {
        let url = self.source.url.to_string();
        let facts = &reply.facts;
        if self.part.len() > 0
            && let Some((expected, found)) = difference(&self.part.journal, facts)
        {
            self.restart()?;
            return Err(HubError::Changed { url, expected, found });
        }
        let other =
            |expected: String, found: String| HubError::NotTheKnownFile { url: url.clone(), expected, found };
        for size in [total, facts.linked_size].into_iter().flatten() {
            if let Some(known) = self.source.expected.size.filter(|&known| known != size) {
                return Err(other(format!("{known} bytes"), format!("{size} bytes")));
            }
        }
        if let (Some(known), Some(linked)) = (self.source.expected.sha256, facts.sha256())
            && known != linked
        {
            return Err(other(format!("SHA-256 {known}"), linked.to_string()));
        }
        if let (Some(linked), Some(total)) = (facts.linked_size, total)
            && linked != total
        {
            return Err(protocol(
                reply,
                &format!("{linked} bytes as the hub says"),
                format!("{total} bytes"),
            ));
        }
        let journal = &mut self.part.journal;
        journal.etag = facts.etag.clone().or(journal.etag.take());
        journal.last_modified = facts.last_modified.clone().or(journal.last_modified.take());
        if facts.linked_etag.is_some() {
            (journal.linked_etag, journal.vouched) = (facts.linked_etag.clone(), facts.vouched);
        }
        journal.size = total.or(facts.linked_size).or(journal.size);
        Ok(())
    }

    fn check_space(&self) -> Result<(), HubError> {
        // A server that does not say how much comes gets no more than there is room for either.
        let rest = self.total().map_or(0, |total| total - self.part.len().min(total));
        let needed = rest.saturating_add(SPACE_MARGIN_BYTES);
        match free_bytes(self.store.dir()) {
            Some(available) if available < needed => Err(HubError::NoSpace {
                dir: self.store.dir().to_owned(),
                name: self.source.file_name.clone(),
                needed,
                available,
            }),
            _ => Ok(()),
        }
    }

    /// Was the hash compared with an expected one (true) or only taken (false)?
    fn check_hash(&self) -> Result<bool, HubError> {
        let found = self.part.sha256();
        match self.wanted_hash() {
            Some(expected) if expected != found => Err(HubError::WrongHash {
                name: self.source.file_name.clone(),
                expected: expected.to_string(),
                found: found.to_string(),
            }),
            // A hash that a server names for its own file proves that it arrived, not that it is the right one.
            Some(_) if self.source.expected.sha256.is_some() || self.part.journal.vouched => Ok(true),
            _ => Ok(catalog::by_content(self.part.len(), &found).is_some()),
        }
    }

    fn finish(self, checked: bool) -> Result<Pulled, HubError> {
        let name = &self.source.file_name;
        let sha256 = self.part.sha256();
        let path = self.store.dir().join(name);
        self.part.finish(&path)?;
        self.store.record(name, &sha256, checked, Some(&self.source.url.to_string()))?;
        let model = self.store.describe_file(name).ok_or_else(|| HubError::Io {
            path,
            source: std::io::Error::new(
                std::io::ErrorKind::NotFound,
                "vanished right after it was put there",
            ),
        })?;
        Ok(Pulled {
            model,
            already_there: false,
            fetched_bytes: self.fetched_bytes,
            resumed_bytes: self.resumed_bytes,
        })
    }

    fn restart(&mut self) -> Result<(), HubError> {
        self.head.clear();
        self.space_seen = 0;
        self.pieced = false;
        self.resumed_bytes = 0;
        self.meter.reset();
        self.part.reset()
    }

    /// hyper reports a body that is shorter than its Content-Length as a broken connection.
    fn name_truncation(&self, reply: &Reply, error: HubError) -> HubError {
        match (error, self.total()) {
            (HubError::Network { .. }, Some(expected)) => {
                HubError::Truncated { host: reply.url.authority(), expected, found: self.part.len() }
            }
            (error, _) => error,
        }
    }

    /// Sleeps before the next attempt, longer with each failure or as the server asked.
    async fn wait(&mut self, failures: u32, error: &HubError) -> Result<(), HubError> {
        let doubled = self.options.backoff.saturating_mul(1 << (failures - 1).min(16));
        let asked = match error {
            HubError::Status { retry_after, .. } => *retry_after,
            _ => None,
        };
        if let Some(asked) = asked.filter(|&asked| asked > self.options.max_wait) {
            return Err(HubError::WaitTooLong {
                url: self.source.url.to_string(),
                seconds: asked.as_secs(),
                limit: self.options.max_wait.as_secs(),
            });
        }
        let wait = asked.unwrap_or(doubled).min(self.options.max_wait);
        let until = Instant::now() + wait;
        self.meter.reset();
        while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            self.tell(Phase::Waiting { reason: error.to_string(), wait: left }, true)?;
            tokio::time::sleep(left.min(Duration::from_millis(200))).await;
        }
        Ok(())
    }

    /// Tells progress, at most ten times a second unless `now`.
    fn tell(&mut self, phase: Phase, now: bool) -> Result<(), HubError> {
        let time = Instant::now();
        if !now && self.told.is_some_and(|told| time.duration_since(told) < Duration::from_millis(100)) {
            return Ok(());
        }
        self.told = Some(time);
        let bytes = self.part.len();
        let rate = if phase == Phase::Downloading { self.meter.rate(time, bytes) } else { 0.0 };
        let progress = Progress::new(phase, bytes, self.total(), rate);
        match (self.on_progress)(&progress) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(HubError::Cancelled { bytes }),
        }
    }
}

/// The first identity that both sides name and that differs.
fn difference(journal: &crate::part::Journal, facts: &Facts) -> Option<(String, String)> {
    let pairs = [(&journal.linked_etag, &facts.linked_etag), (&journal.etag, &facts.etag)];
    for (before, now) in pairs {
        if let (Some(before), Some(now)) = (before, now) {
            // The hub's identity is of the content; with it in agreement a storage host's own tag does not matter.
            return (before != now).then(|| (before.clone(), now.clone()));
        }
    }
    None
}

pub(crate) fn protocol(reply: &Reply, expected: &str, found: String) -> HubError {
    HubError::Protocol { url: reply.url.to_string(), expected: expected.to_owned(), found }
}

pub(crate) fn status_error(reply: &Reply, options: &PullOptions) -> HubError {
    let hint = match (reply.status.as_u16(), options.token.is_some()) {
        (401 | 403, false) => ": the file needs a token (HF_TOKEN or MUSER_HUB_TOKEN)",
        (401 | 403, true) if !reply.with_token => {
            ": your token was not sent there, since it is for the hub only (--hub names another)"
        }
        (401 | 403, true) => ": it refuses your token for this file",
        (404 | 410, _) => ": there is no such file; check owner, repository, revision and file name",
        (416, _) => ": it has no bytes after those that are here",
        (429, _) => ": too many requests",
        _ => "",
    };
    let seconds = reply.headers.get(header::RETRY_AFTER).and_then(|v| v.to_str().ok()?.trim().parse().ok());
    HubError::Status {
        url: reply.url.to_string(),
        status: reply.status.as_u16(),
        hint: hint.to_owned(),
        retry_after: seconds.map(Duration::from_secs),
    }
}

/// Bytes free for us on the file system of `dir`, where the system tells.
#[cfg(unix)]
fn free_bytes(dir: &std::path::Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(dir).ok()?;
    stat.f_bavail.checked_mul(stat.f_frsize)
}

#[cfg(not(unix))]
fn free_bytes(_dir: &std::path::Path) -> Option<u64> {
    None
}
