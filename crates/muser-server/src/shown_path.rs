//! Paths as they are logged: what stands where a route has a parameter is the client's own word (a session's name, say), and
//! so is whatever no route knows.

use std::collections::HashSet;

/// What stands for a word that no route knows.
const UNKNOWN: &str = "…";

/// The routes' paths in segments, and all the words in them.
#[derive(Debug)]
pub(crate) struct KnownPaths {
    paths: Vec<Vec<&'static str>>,
    words: HashSet<&'static str>,
}

/// A request's path as it may be logged; travels with the request.
#[derive(Debug, Clone)]
pub(crate) struct ShownPath(pub(crate) String);

fn segments(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter(|segment| !segment.is_empty())
}

fn is_parameter(segment: &str) -> bool {
    segment.starts_with('{')
}

impl KnownPaths {
    /// Of all paths that are routed.
    pub(crate) fn new(paths: impl Iterator<Item = &'static str>) -> Self {
        let paths: Vec<Vec<&str>> = paths.map(|path| segments(path).collect()).collect();
        let words = paths.iter().flatten().copied().filter(|word| !is_parameter(word)).collect();
        Self { paths, words }
    }

    /// A path without what its sender chose.
    pub(crate) fn shown(&self, path: &str) -> String {
        let mut candidates: Vec<&[&str]> = self.paths.iter().map(Vec::as_slice).collect();
        let mut out = String::with_capacity(path.len().min(64));
        for (at, segment) in segments(path).enumerate() {
            let here = |path: &&[&'static str], is: fn(&str, &str) -> bool| {
                path.get(at).is_some_and(|known| is(known, segment))
            };
            let literal = |known: &str, found: &str| known == found;
            let parameter = |known: &str, _: &str| is_parameter(known);
            // A name that is also a word of the table is still a name.
            let is: fn(&str, &str) -> bool =
                if candidates.iter().any(|path| here(path, literal)) { literal } else { parameter };
            candidates.retain(|path| here(path, is));
            out.push('/');
            match candidates.first() {
                Some(path) => out.push_str(path[at]),
                None => out.push_str(self.words.get(segment).copied().unwrap_or(UNKNOWN)),
            }
            if at > 8 {
                out.push_str("/…");
                break;
            }
        }
        if out.is_empty() { "/".to_owned() } else { out }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn names_are_left_out_of_paths() {
        let known = crate::routes::known_paths();
        let shown_path = |path: &str| known.shown(path);
        for (path, shown) in [
            ("/", "/"),
            ("/v1/chat/completions", "/v1/chat/completions"),
            ("/v1/sessions", "/v1/sessions"),
            ("/v1/sessions/diary", "/v1/sessions/{name}"),
            ("/v1/sessions/diary/save", "/v1/sessions/{name}/save"),
            ("/v1//sessions/diary/", "/v1/sessions/{name}"),
            // Names that are words of other routes, and what follows names where no route goes on.
            ("/v1/sessions/save", "/v1/sessions/{name}"),
            ("/v1/sessions/chat/completions", "/v1/sessions/{name}/completions"),
            ("/v1/sessions/my/secret", "/v1/sessions/{name}/…"),
            ("/v1/sessions/diary/rename", "/v1/sessions/{name}/…"),
            // Mistyped, so that no route is met.
            ("/sessions/diary", "/sessions/…"),
            ("/v1/session/diary", "/v1/…/…"),
            ("/v1/v1/sessions/diary", "/v1/v1/sessions/…"),
            ("/v1/v1/chat/completions", "/v1/v1/chat/completions"),
            ("/wp-admin/setup.php", "/…/…"),
            ("/page.css", "/page.css"),
            ("/v1/packs/00aa/pin", "/v1/packs/{id}/pin"),
            ("/slots/0", "/slots/{id}"),
        ] {
            assert_eq!(shown_path(path), shown, "{path}");
        }
        assert!(shown_path(&"/secret".repeat(10_000)).len() < 100);
        assert_eq!(shown_path("/v1/models/org/model"), "/v1/models/{model}/…");
    }
}
