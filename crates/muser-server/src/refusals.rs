//! What the operator hears of requests that were not served: a line in the log and a count, never the client's own words.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use axum::http::Method;
use axum::response::Response;

use crate::app::App;
use crate::refusal::Refusal;

/// Logs and counts an answer that is an error.
pub(crate) fn note(app: &App, method: &Method, path: &str, response: &Response) {
    let status = response.status().as_u16();
    let refusal = response.extensions().get::<Refusal>();
    if let Some(loaded) = app.loaded_if_any() {
        loaded.metrics.count_refused(status, refusal.map_or("none", |refusal| refusal.code));
    }
    // Probes hear 503 every second while a model loads; that is no news.
    if status == 503 {
        return;
    }
    static LINES: Mutex<Option<Seldom>> = Mutex::new(None);
    let Some(missed) =
        LINES.lock().ok().and_then(|mut lines| lines.get_or_insert_default().ask(Instant::now()))
    else {
        return;
    };
    let (code, param, reason) = match refusal {
        Some(refusal) => (refusal.code, refusal.param.as_deref(), refusal.sentence.as_str()),
        None => ("none", None, ""),
    };
    tracing::warn!(%method, path, status, code, param, reason, lines_left_out = missed, "request refused");
}

/// Lets some lines a second through, so that a client cannot fill a disk with them.
#[derive(Debug, Default)]
struct Seldom {
    since: Option<Instant>,
    said: u32,
    missed: u64,
}

impl Seldom {
    const PER_SECOND: u32 = 20;

    /// Whether to say it, and then how often nothing was said.
    fn ask(&mut self, now: Instant) -> Option<u64> {
        if self.since.is_none_or(|since| now.duration_since(since) >= Duration::from_secs(1)) {
            (self.since, self.said) = (Some(now), 0);
        }
        if self.said >= Self::PER_SECOND {
            self.missed += 1;
            return None;
        }
        self.said += 1;
        Some(std::mem::take(&mut self.missed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_a_few_lines_and_a_count() {
        let (mut seldom, begun) = (Seldom::default(), Instant::now());
        let said = (0..1000).filter(|_| seldom.ask(begun).is_some()).count();
        assert_eq!(said, 20);
        assert_eq!(seldom.ask(begun + Duration::from_secs(1)), Some(980));
        assert_eq!(seldom.ask(begun + Duration::from_secs(1)), Some(0));
    }
}
