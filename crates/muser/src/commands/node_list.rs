//! `muser node list`: which nodes are known, how they are, and what would have to change for those that are not asked.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use muser_handoff::{Entry, NodeError, Registry, Visit, visit};
use serde_json::{Value, json};

use crate::cli::NodeListArgs;
use crate::node_notes::{Difference, Note, Notes};
use crate::output::{Console, sanitize};

/// How long a node may take to say who it is.
const PATIENCE: Duration = Duration::from_secs(3);

/// What is known of a node, and what it says.
pub struct Seen {
    pub entry: Entry,
    said: Option<Result<Visit, NodeError>>,
    note: Option<Note>,
    /// Where it differs from what was computed here last; `None` also where that is not known.
    differs: Option<Difference>,
    /// Does it compute what was computed here last?
    fits: Option<bool>,
    /// What its canary or an audit found, of its present program and this one.
    shown: Option<bool>,
}

pub fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

/// Asks the nodes of the registry, all at the same time.
pub fn look(home: &Path, offline: bool) -> Result<Vec<Seen>> {
    let nodes = Registry::read(home)?.nodes;
    if nodes.is_empty() {
        return Ok(Vec::new());
    }
    let notes = Notes::read(home);
    let looking = async {
        let visits: Vec<_> = nodes
            .into_iter()
            .map(|entry| {
                let home: PathBuf = home.to_owned();
                tokio::spawn(async move {
                    let asked = !offline && entry.address.is_some();
                    let said = if asked { Some(visit(&home, &entry, PATIENCE).await) } else { None };
                    (entry, said)
                })
            })
            .collect();
        let mut seen = Vec::new();
        for one in visits {
            let (entry, said) = one.await?;
            seen.push(Seen::new(entry, said, &notes));
        }
        Ok(seen)
    };
    runtime()?.block_on(looking)
}

impl Seen {
    fn new(entry: Entry, said: Option<Result<Visit, NodeError>>, notes: &Notes) -> Self {
        let hello = said.as_ref().and_then(|said| said.as_ref().ok()).map(|visit| &visit.hello);
        // Where nothing was computed here yet there is nothing to compare with.
        let both = hello.filter(|hello| !hello.is_visit()).zip(notes.ours.as_ref());
        let differs = both.and_then(|(hello, ours)| ours.difference(hello));
        let fits = both.map(|_| differs.is_none());
        let verdict = both
            .and_then(|(hello, ours)| notes.verdict(&entry.name, entry.key, &hello.build, &ours.identity));
        let shown = verdict.map(|canary| canary.equal);
        let note = notes.note(&entry).cloned();
        Self { entry, said, note, differs, fits, shown }
    }

    /// One word.
    fn state(&self) -> &'static str {
        match &self.said {
            None => "not asked",
            Some(Err(_)) => "unreachable",
            Some(Ok(_)) if self.shown == Some(false) => "aside",
            Some(Ok(visit)) if !visit.hello.serves_prefill => "no_prompts",
            Some(Ok(_)) if self.fits == Some(false) => "unlike",
            Some(Ok(visit)) if visit.load.draining => "draining",
            Some(Ok(_)) if self.shown.is_none() => "unproven",
            Some(Ok(_)) => "ready",
        }
    }

    /// Why it is not asked, and what would have to change.
    fn why(&self) -> Option<String> {
        match self.state() {
            "unreachable" => self.said.as_ref()?.as_ref().err().map(ToString::to_string),
            "aside" => {
                let found = self.note.as_ref()?.canary.as_ref()?.found.clone().unwrap_or_default();
                Some(format!("put aside: {found}; `muser node test {}` once that is mended", self.entry.name))
            }
            "no_prompts" => Some(
                "reads no prompts for this node: it needs --node-listen or `muser node serve`, and `prefill` \
                 in its nodes.toml"
                    .into(),
            ),
            "unlike" => self.differs.as_ref().map(ToString::to_string),
            "unproven" => {
                let name = &self.entry.name;
                Some(match self.fits {
                    Some(_) => format!("not shown to compute the same bits yet: `muser node test {name}`"),
                    None => format!("nothing was computed here to compare it with: `muser node test {name}`"),
                })
            }
            _ => None,
        }
    }

    fn last_fault(&self) -> Option<&str> {
        self.note.as_ref()?.last_fault.as_deref()
    }

    /// A line for people, without the name.
    pub fn line(&self) -> String {
        let mut words = vec![self.state().replace('_', " ")];
        if let Some(Ok(visit)) = &self.said {
            let load = &visit.load;
            if visit.hello.serves_prefill {
                words.push(visit.hello.route.clone());
                words.push(format!(
                    "{} of {} places, {} rows queued",
                    load.running, load.places, load.queued_rows
                ));
            }
            words.push(format!("{:.1} ms", visit.round_trip.as_secs_f64() * 1e3));
        }
        if let Some(rate) = self.note.as_ref().and_then(|note| note.bytes_per_s) {
            words.push(format!("{:.0} MB/s", rate / 1e6));
        }
        words.extend(self.why());
        if let Some(fault) = self.last_fault().filter(|_| self.state() != "unreachable") {
            words.push(format!("last fault: {fault}"));
        }
        sanitize(&words.join(", ")).into_owned()
    }

    pub fn as_json(&self) -> Value {
        let entry = &self.entry;
        let mut value = json!({
            "name": entry.name,
            "address": entry.address,
            "key": entry.key.to_string(),
            "next_key": entry.next_key.map(|key| key.to_string()),
            "may": entry.rights.words().collect::<Vec<_>>(),
            "transfers": entry.transfers,
            "rows_a_minute": entry.rows_a_minute,
            "streams": entry.streams,
            "state": self.state(),
            "fits": self.fits,
            "shown_equal": self.shown,
            "why": self.why(),
            "bytes_per_s": self.note.as_ref().and_then(|note| note.bytes_per_s),
            "last_fault": self.last_fault(),
        });
        match &self.said {
            Some(Ok(visit)) => {
                value["serves_prefill"] = visit.hello.serves_prefill.into();
                value["route"] = visit.hello.route.clone().into();
                value["build"] = visit.hello.build.clone().into();
                value["queued_rows"] = visit.load.queued_rows.into();
                value["running"] = visit.load.running.into();
                value["places"] = visit.load.places.into();
                value["draining"] = visit.load.draining.into();
                value["round_trip_ms"] = (visit.round_trip.as_secs_f64() * 1e3).into();
            }
            Some(Err(error)) => value["fault"] = error.to_string().into(),
            None => {}
        }
        if let Some(differs) = &self.differs {
            value["differs"] = json!({"part": differs.part, "here": differs.ours, "there": differs.theirs});
        }
        value
    }
}

/// Runs `muser node list`.
pub fn list(home: &Path, args: NodeListArgs, console: &Console) -> Result<()> {
    let seen = look(home, args.offline)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        let list: Vec<_> = seen.iter().map(Seen::as_json).collect();
        writeln!(out, "{}", serde_json::to_string_pretty(&list)?)?;
        return Ok(());
    }
    if seen.is_empty() {
        console.note("no nodes are known here; `muser node invite` on one machine and `muser node add` on another make two");
    }
    for one in &seen {
        let may: Vec<_> = one.entry.rights.words().collect();
        let may =
            if may.is_empty() { "may ask nothing".to_owned() } else { format!("may ask {}", may.join(", ")) };
        let place = one.entry.address.as_deref().unwrap_or("dials this node");
        writeln!(out, "{:16} {place:24} {may:24} {}", one.entry.name, one.line())?;
    }
    Ok(())
}
