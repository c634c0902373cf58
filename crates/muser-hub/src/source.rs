//! From what a user types to an address, a file name and what is known of the content.

use crate::catalog::{self, KnownFile};
use crate::digest::Sha256;
use crate::error::HubError;
use crate::url::{Url, decode_segment, encode_segment};

/// The public hub, used when no other base URL is configured.
pub const DEFAULT_BASE: &str = "https://huggingface.co";

/// A hub: where `owner/repo/file` lives.
#[derive(Clone, Debug)]
pub struct Hub {
    base: Url,
}

impl Hub {
    /// From a base URL such as [`DEFAULT_BASE`].
    pub fn new(base: &str) -> Result<Self, HubError> {
        match Url::parse(base) {
            Ok(base) => Ok(Self { base }),
            Err(why) => {
                Err(HubError::BadName { given: base.to_owned(), why: format!("as a hub's address: {why}") })
            }
        }
    }

    /// The base URL.
    pub fn base(&self) -> &Url {
        &self.base
    }

    /// `{base}/{owner}/{repo}/resolve/{revision}/{file}`.
    fn resolve(&self, repo: &str, revision: &str, file: &str) -> Url {
        let encode = |path: &str| path.split('/').map(encode_segment).collect::<Vec<_>>().join("/");
        self.base.with_path(&format!(
            "{}/resolve/{}/{}",
            encode(repo),
            encode_segment(revision),
            encode(file)
        ))
    }
}

/// What is known about a file's content before it is fetched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// Bytes.
    pub size: Option<u64>,
    /// Hash of the content.
    pub sha256: Option<Sha256>,
}

/// One file to pull.
#[derive(Clone, Debug)]
pub struct Source {
    /// Where it is.
    pub url: Url,
    /// Its name in the store: one plain path component.
    pub file_name: String,
    /// What it must be, from the catalog or the caller.
    pub expected: Expected,
    /// The catalog's entry, for short names.
    pub known: Option<&'static KnownFile>,
}

impl Source {
    /// Understands a short name of the catalog, a URL, `owner/repo/file` or `owner/repo@revision/file`.
    ///
    /// A name of the form `x-00001-of-00003.gguf` stands for all files of the set.
    pub fn parse(given: &str, hub: &Hub) -> Result<Vec<Self>, HubError> {
        let bad = |why: &str| HubError::BadName { given: given.to_owned(), why: why.to_owned() };
        if let Some(known) = catalog::by_name(given) {
            return Ok(vec![Self::known(known, hub)]);
        }
        if given.contains("://") {
            let url =
                Url::parse(given).and_then(|url| the_file_itself(&url, hub)).map_err(|why| bad(&why))?;
            let last = url.path().rsplit('/').next().unwrap_or_default();
            let name =
                decode_segment(last).ok_or_else(|| bad("its last part is not percent-encoded UTF-8"))?;
            check_file_name(&name).map_err(|why| bad(&why))?;
            let folder = url.path()[..url.path().len() - last.len()].to_owned();
            let query = url.target()[url.path().len()..].to_owned();
            let mut sources = Vec::new();
            for file_name in split_set(&name) {
                let url = if file_name == name {
                    url.clone()
                } else {
                    let target = format!("{folder}{}{query}", encode_segment(&file_name));
                    url.join(&target).map_err(|why| bad(&why))?
                };
                sources.push(Self { url, file_name, expected: Expected::default(), known: None });
            }
            return Ok(sources);
        }
        let mut parts = given.splitn(3, '/');
        let (Some(owner), Some(repo), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            let names: Vec<_> = catalog::CATALOG.iter().filter_map(|f| f.names.first().copied()).collect();
            return Err(bad(&format!("the short names are {}", names.join(", "))));
        };
        let (repo, revision) = repo.split_once('@').unwrap_or((repo, "main"));
        if [owner, repo, revision].iter().any(|part| part.is_empty() || part.starts_with('.')) {
            return Err(bad("owner, repository and revision must not be empty or begin with a dot"));
        }
        if path.split('/').any(|part| part.is_empty() || part == "." || part == "..") {
            return Err(bad("the path in the repository has an empty part, \".\" or \"..\""));
        }
        let (folder, name) = path.rsplit_once('/').map_or(("", path), |(folder, name)| (folder, name));
        check_file_name(name).map_err(|why| bad(&why))?;
        let repo = format!("{owner}/{repo}");
        Ok(split_set(name)
            .into_iter()
            .map(|file_name| {
                let path =
                    if folder.is_empty() { file_name.clone() } else { format!("{folder}/{file_name}") };
                // Who names a file of a repository takes what is there, even where the catalog knows an earlier content.
                let url = hub.resolve(&repo, revision, &path);
                Self { url, file_name, expected: Expected::default(), known: None }
            })
            .collect())
    }

    fn known(known: &'static KnownFile, hub: &Hub) -> Self {
        Self {
            url: hub.resolve(known.repo, "main", known.file),
            file_name: known.file.to_owned(),
            expected: Expected { size: Some(known.size), sha256: Some(known.digest()) },
            known: Some(known),
        }
    }
}

/// The address of a file for the address of the page that shows it, which is what people copy from a browser.
fn the_file_itself(url: &Url, hub: &Hub) -> Result<Url, String> {
    let raw = match url.host() {
        "github.com" | "www.github.com" => "raw",
        "huggingface.co" | "www.huggingface.co" | "hf.co" => "resolve",
        _ if url.same_origin(&hub.base) => "resolve",
        _ => return Ok(url.clone()),
    };
    let path = url.path().strip_prefix(hub.base.path().trim_end_matches('/')).unwrap_or(url.path());
    // owner, repository, "blob", revision, file: a folder of that name may come later.
    let mut parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    if parts.len() < 5 || parts[2] != "blob" {
        return Ok(url.clone());
    }
    parts[2] = raw;
    let before = &url.path()[..url.path().len() - path.len()];
    // What is asked of the page means nothing for the file.
    url.join(&format!("{before}/{}", parts.join("/")))
}

/// Is this one plain component that can be created in the store on every system?
pub(crate) fn check_file_name(name: &str) -> Result<(), String> {
    if name.is_empty() {
        return Err("it names no file".to_owned());
    }
    if name.starts_with('.') || name.len() > 200 {
        return Err(format!(
            "\"{name}\" is not a file name that begins without a dot and has up to 200 bytes"
        ));
    }
    // Names that Windows gives to devices, whatever their ending, and endings that it drops.
    const DEVICES: [&str; 6] = ["con", "prn", "aux", "nul", "conin$", "conout$"];
    let stem = name.split('.').next().unwrap_or_default().trim_end().to_ascii_lowercase();
    let port = stem.strip_prefix("com").or_else(|| stem.strip_prefix("lpt"));
    let numbered = port.is_some_and(|rest| rest.chars().count() == 1 && rest.chars().all(char::is_numeric));
    if DEVICES.contains(&stem.as_str()) || numbered || name.ends_with(['.', ' ']) {
        return Err(format!("\"{name}\" is not a file name on every system"));
    }
    match name.chars().find(|c| c.is_control() || "/\\:*?\"<>|".contains(*c)) {
        Some(c) => Err(format!("the file name contains {c:?}")),
        None => Ok(()),
    }
}

/// All files of the split set that `name` belongs to, or `name` alone.
fn split_set(name: &str) -> Vec<String> {
    let alone = || vec![name.to_owned()];
    let Some(stem) = name.strip_suffix(".gguf") else { return alone() };
    // `-00001-of-00003`: fifteen ASCII bytes at the end.
    let Some(at) = stem.len().checked_sub(15).filter(|&at| stem.is_char_boundary(at)) else { return alone() };
    let (base, tail) = stem.split_at(at);
    let digits = |range: std::ops::Range<usize>| {
        tail.get(range).filter(|d| d.bytes().all(|b| b.is_ascii_digit())).and_then(|d| d.parse::<u32>().ok())
    };
    let shape = tail.starts_with('-') && tail.get(6..10) == Some("-of-");
    match (shape, digits(1..6), digits(10..15)) {
        (true, Some(1..), Some(count @ 1..=1000)) => {
            (1..=count).map(|i| format!("{base}-{i:05}-of-{count:05}.gguf")).collect()
        }
        _ => alone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(given: &str) -> Result<Vec<Source>, HubError> {
        Source::parse(given, &Hub::new("https://hub.example/base").unwrap())
    }

    fn check(given: &str, url: &str, file: &str) {
        let sources = parse(given).unwrap();
        assert_eq!(sources.len(), 1, "{given}");
        assert_eq!(
            (sources[0].url.to_string().as_str(), sources[0].file_name.as_str()),
            (url, file),
            "{given}"
        );
    }

    #[test]
    fn names_urls_and_repositories() {
        check(
            "30b",
            "https://hub.example/base/meta-models/Muse-Glimmer-30B-GGUF/resolve/main/Muse-Glimmer-30B-KQuant-17GB-Q4_K_M.gguf",
            "Muse-Glimmer-30B-KQuant-17GB-Q4_K_M.gguf",
        );
        check("o/r/f.gguf", "https://hub.example/base/o/r/resolve/main/f.gguf", "f.gguf");
        check("o/r@v2/sub dir/f.gguf", "https://hub.example/base/o/r/resolve/v2/sub%20dir/f.gguf", "f.gguf");
        check("http://h:8/x/y%20z.gguf?token=secret", "http://h:8/x/y%20z.gguf?…", "y z.gguf");
    }

    #[test]
    fn a_page_about_a_file_means_the_file() {
        check(
            "https://huggingface.co/o/r/blob/main/deep/x.gguf?download=true",
            "https://huggingface.co/o/r/resolve/main/deep/x.gguf",
            "x.gguf",
        );
        check(
            "https://hub.example/base/o/r/blob/v1/x.gguf",
            "https://hub.example/base/o/r/resolve/v1/x.gguf",
            "x.gguf",
        );
        check("https://github.com/o/r/blob/main/x.gguf", "https://github.com/o/r/raw/main/x.gguf", "x.gguf");
        for same in
            ["https://other.example/o/r/blob/main/x.gguf", "https://hf.co/o/r/resolve/main/blob/x.gguf"]
        {
            check(same, same, "x.gguf");
        }
        let set = parse("https://hf.co/o/r/blob/main/m-00001-of-00002.gguf").unwrap();
        assert_eq!(set[1].url.target(), "/o/r/resolve/main/m-00002-of-00002.gguf");
    }

    #[test]
    fn only_short_names_bring_size_and_hash() {
        let source = &parse("dflash").unwrap()[0];
        assert_eq!(source.expected.size, Some(1_631_208_128));
        assert!(source.expected.sha256.is_some());
        let named = &parse("meta-models/Muse-Glimmer-30B-GGUF/dflash-kquant.gguf").unwrap()[0];
        assert_eq!(named.expected, Expected::default());
    }

    #[test]
    fn split_sets_are_pulled_whole() {
        let names: Vec<_> =
            parse("o/r/BF16/m-00002-of-00003.gguf").unwrap().into_iter().map(|s| s.file_name).collect();
        assert_eq!(names, ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"]);
        let urls = parse("http://h/a/m-00001-of-00002.gguf?k=v").unwrap();
        assert_eq!(urls[1].url.target(), "/a/m-00002-of-00002.gguf?k=v");
        for alone in ["m-00000-of-00002.gguf", "m-1-of-2.gguf", "äöüß-of-00002.gguf", "m-00001-of-99999.gguf"]
        {
            assert_eq!(split_set(alone), [alone]);
        }
    }

    #[test]
    fn what_means_nothing_is_refused() {
        for bad in [
            "",
            "nothing",
            "o/r",
            "o/r/",
            "o//f",
            "o/r/../f",
            "../r/f",
            "o/r@/f",
            "http://h/",
            "http://h/a/..",
            "http://h/%2e%2e%2fetc",
            "http://h/a%00b",
            "ftp://h/f",
            "o/r/.hidden",
            "http://h/a%ff",
            "http://h/CON.gguf",
            "http://h/lpt1.gguf",
            "http://h/a.gguf.",
            "http://h/aux",
        ] {
            assert!(matches!(parse(bad), Err(HubError::BadName { .. })), "{bad}");
        }
    }
}
