//! `muser pack`: what is in a store of packs, and its upkeep. The work is `muser_pack`'s; here are names and words.

use std::fs::OpenOptions;
use std::io::{BufWriter, Write as _};
use std::path::PathBuf;

use anyhow::{Result, anyhow, bail};
use muser_pack::store::open_place;
use muser_pack::{Identity, KeyFile, KeyRing, Library, LibraryOptions, PackError, PackId, PackInfo, Refusal};

use crate::cli::{
    PackArgs, PackCommand, PackExportArgs, PackGcArgs, PackImportArgs, PackKeyCommand, PackRmArgs,
    PackShowArgs, PackVerifyArgs,
};
use crate::env_vars;
use crate::output::{Console, HintExt as _, Progress, sanitize, usage_error};

/// Runs the command.
pub fn run(args: PackArgs, console: &Console) -> Result<()> {
    let place = Place::of(args.packs, args.pack_key_file, args.pack_plain)?;
    match args.command {
        PackCommand::Ls(args) => list(&place, args.json, console),
        PackCommand::Show(args) => show(&place, &args),
        PackCommand::Verify(args) => verify(&place, &args, console),
        PackCommand::Export(args) => export(&place, &args, console),
        PackCommand::Import(args) => import(&place, &args, console),
        PackCommand::Pin(args) => {
            let library = place.open_existing()?;
            Ok(library.set_pinned(find(&library, &args.pack)?, !args.off)?)
        }
        PackCommand::Rm(args) => remove(&place, &args, console),
        PackCommand::Gc(args) => collect(&place, args, console),
        PackCommand::Recover => recover(&place, console),
        PackCommand::Accept => {
            place.open_anyhow()?.accept_as_it_is()?;
            console.note(format!("{} is taken as it is", place.packs.display()));
            Ok(())
        }
        PackCommand::Key(args) => key(&place, args.command, console),
    }
}

/// Where the store and its key are.
struct Place {
    packs: PathBuf,
    key: PathBuf,
    plain: bool,
}

impl Place {
    fn of(packs: Option<PathBuf>, key: Option<PathBuf>, plain: bool) -> Result<Self> {
        let home = || {
            let home = env_vars::muser_home().ok_or_else(|| anyhow!("no home folder is known"));
            home.hint("set MUSER_HOME, or give --packs and --pack-key-file")
        };
        let default_key = home().map(|home| KeyFile::default_path(&home));
        Ok(Self {
            packs: packs.map_or_else(|| Ok(home()?.join("packs")), anyhow::Ok)?,
            key: key.map_or(default_key, anyhow::Ok)?,
            plain,
        })
    }

    /// The store, if there is one: looking at it creates nothing.
    fn open(&self) -> Result<Option<Library>> {
        let remote = self.packs.to_str().is_some_and(|place| place.starts_with("s3://"));
        // A folder without a catalog may be a store that has lost it.
        if remote || self.packs.join("catalog").exists() || self.packs.join("packs").is_dir() {
            self.open_with(&self.keys()?).map(Some)
        } else {
            Ok(None)
        }
    }

    fn open_existing(&self) -> Result<Library> {
        let library = self.open()?.ok_or_else(|| anyhow!("no packs in {}", self.packs.display()))?;
        match library.suspended() {
            Some(reason) => bail!("{} cannot be used: {reason}", self.packs.display()),
            None => Ok(library),
        }
    }

    /// Also one that is suspended: to be looked at, or mended.
    fn open_anyhow(&self) -> Result<Library> {
        self.open()?.ok_or_else(|| anyhow!("no packs in {}", self.packs.display()))
    }

    fn open_with(&self, keys: &KeyRing) -> Result<Library> {
        let store = open_place(&self.packs, None)?;
        let options = LibraryOptions {
            // Beside the key: what was last seen of every store that is sealed with it.
            anchor: Some(self.key.with_extension("seen")),
            key_file: Some(self.key.clone()),
            encrypt: !self.plain,
            ..LibraryOptions::default()
        };
        let opened = Library::open(store, keys.clone(), options);
        let hint = opened.as_ref().err().and_then(PackError::refusal).map(|reason| self.hint(reason));
        match hint {
            Some(hint) => opened.hint(hint),
            None => Ok(opened?),
        }
    }

    fn keys(&self) -> Result<KeyRing> {
        Ok(KeyFile::open(&self.key)?)
    }

    fn hint(&self, reason: &Refusal) -> String {
        match reason {
            Refusal::ForeignKey { .. } => {
                format!(
                    "{} is not this store's key; give the right one with --pack-key-file",
                    self.key.display()
                )
            }
            _ => format!("if the store is beyond repair, remove {} as a whole", self.packs.display()),
        }
    }
}

/// The pack whose name begins so.
fn find(library: &Library, beginning: &str) -> Result<PackId> {
    let beginning = beginning.to_ascii_lowercase();
    let packs = library.packs();
    let mut found = packs.iter().filter(|pack| pack.id.to_string().starts_with(&beginning));
    match (found.next(), found.next()) {
        (Some(pack), None) => Ok(pack.id),
        (Some(_), Some(_)) => Err(usage_error(format!("several packs begin with {beginning}"))),
        (None, _) => {
            let whole = PackId::parse(&beginning);
            whole.ok_or_else(|| anyhow!("no pack begins with {}", sanitize(&beginning)))
        }
    }
}

fn list(place: &Place, json: bool, console: &Console) -> Result<()> {
    let library = place.open()?;
    let packs = library.as_ref().map(Library::packs).unwrap_or_default();
    let mut out = std::io::stdout().lock();
    if json {
        let list: Vec<_> = packs.iter().map(as_json).collect();
        writeln!(out, "{}", serde_json::to_string_pretty(&list)?)?;
    } else {
        for pack in &packs {
            let pinned = if pack.pinned { "  pinned" } else { "" };
            let (size, age) = (pack.bytes as f64 / 1e6, age(pack.created_unix_s));
            let name = &pack.id.to_string()[..16];
            writeln!(out, "{name}  {:7} positions  {size:9.2} MB  {age:>8}{pinned}", pack.positions)?;
        }
    }
    let Some(library) = library else {
        console.note(format!("no packs in {}", place.packs.display()));
        return Ok(());
    };
    let held = library.store().usage()?.held_bytes as f64 / 1e9;
    console.note(format!("{} packs, {held:.3} GB on disk in {}", packs.len(), place.packs.display()));
    for (reason, count) in library.counters().snapshot().refused() {
        console.warning(format!("{count} refused: {reason}"));
    }
    if let Some(reason) = library.suspended() {
        console.warning(reason.to_string());
    }
    warn_of_damage(&library, console);
    Ok(())
}

fn warn_of_damage(library: &Library, console: &Console) {
    let damaged = library.damaged_records();
    if damaged > 0 {
        console.warning(format!(
            "{damaged} records of the catalog are damaged, and nothing is deleted for not being named; `muser pack recover` \
             rebuilds it"
        ));
    }
}

/// Rebuilds the catalog.
fn recover(place: &Place, console: &Console) -> Result<()> {
    let library = place.open_anyhow()?;
    let recovered = match library.recover() {
        Err(PackError::Busy) => {
            return Err(PackError::Busy).hint("a running muser reads or writes packs; stop it first");
        }
        other => other?,
    };
    for (object, reason) in &recovered.refused {
        console.warning(format!("{object} stays where it is and is not used: {reason}"));
    }
    console
        .note(format!("{} packs and {} sessions are in the catalog now", recovered.packs, recovered.records));
    Ok(())
}

fn as_json(pack: &PackInfo) -> serde_json::Value {
    serde_json::json!({
        "id": pack.id.to_string(),
        "positions": pack.positions,
        "full_segments": pack.segments.0,
        "sliding_segments": pack.segments.1,
        "bytes": pack.bytes,
        "pinned": pack.pinned,
        "created": pack.created_unix_s,
        "identity": hex(&pack.identity),
    })
}

fn show(place: &Place, args: &PackShowArgs) -> Result<()> {
    let library = place.open_existing()?;
    let id = find(&library, &args.pack)?;
    let (identity, units) = library.contents(id)?;
    let pack = library.pack(id).ok_or_else(|| anyhow!("pack {id} is gone"))?;
    let tokens: Vec<_> = units.iter().map(|unit| unit.as_token()).collect();
    let mut out = std::io::stdout().lock();
    if args.json {
        let mut value = as_json(&pack);
        value["computed_with"] = serde_json::Value::Object(
            facts(&identity).into_iter().map(|(name, fact)| (name.to_owned(), fact.into())).collect(),
        );
        if args.tokens {
            value["tokens"] = serde_json::json!(tokens);
        }
        writeln!(out, "{}", serde_json::to_string_pretty(&value)?)?;
        return Ok(());
    }
    writeln!(out, "pack             {id}")?;
    writeln!(out, "positions        {}", pack.positions)?;
    writeln!(out, "segments         {} full, {} sliding", pack.segments.0, pack.segments.1)?;
    writeln!(out, "size             {:.2} MB", pack.bytes as f64 / 1e6)?;
    writeln!(out, "published        {} ago", age(pack.created_unix_s))?;
    writeln!(out, "pinned           {}", if pack.pinned { "yes" } else { "no" })?;
    for (name, fact) in facts(&identity) {
        writeln!(out, "{name:16} {}", sanitize(&fact))?;
    }
    if args.tokens {
        let words: Vec<_> = tokens.iter().map(|id| id.map_or("image".into(), |id| id.to_string())).collect();
        writeln!(out, "tokens           {}", words.join(" "))?;
    }
    Ok(())
}

/// What a pack was computed with, for people.
fn facts(identity: &Identity) -> Vec<(&'static str, String)> {
    let representation = &identity.representation;
    let draft = identity.draft.as_ref().map_or("none".into(), |draft| hex(&draft.weights[..8]));
    let media = identity.media.as_ref().map_or("none".into(), |media| hex(&media.projector[..8]));
    vec![
        ("weights", hex(&identity.weights[..8])),
        ("quantisation", identity.quantisation.clone()),
        ("tokenizer", hex(&identity.tokenizer[..8])),
        ("chat template", hex(&identity.template[..8])),
        ("layers", identity.geometry.layers.len().to_string()),
        ("window", identity.geometry.window.to_string()),
        ("adapters", identity.adapters.len().to_string()),
        ("projector", media),
        ("draft model", draft),
        ("context policy", identity.context_policy.clone()),
        ("numeric route", representation.route.clone()),
        ("KV type", representation.kv_type.clone()),
        ("layout", representation.layout.clone()),
        ("full block", format!("{} bytes", representation.full_block_bytes)),
        ("sliding block", format!("{} bytes", representation.sliding_block_bytes)),
    ]
}

fn verify(place: &Place, args: &PackVerifyArgs, console: &Console) -> Result<()> {
    let library = place.open_existing()?;
    let packs: Vec<PackId> = if args.packs_named.is_empty() {
        library.packs().iter().map(|pack| pack.id).collect()
    } else {
        args.packs_named.iter().map(|name| find(&library, name)).collect::<Result<_>>()?
    };
    let total = packs.iter().filter_map(|id| library.pack(*id)).map(|pack| pack.bytes).sum();
    let bar = Progress::bytes(console, "verifying", total);
    let mut damaged = library.counters().snapshot().refused().map(|(_, count)| count as usize).sum::<usize>();
    let mut bytes = 0;
    let mut out = std::io::stdout().lock();
    for id in &packs {
        let report = library.verify(*id, &mut |done| bar.advance(done))?;
        bytes += report.bytes;
        damaged += usize::from(!report.refused.is_empty());
        for (object, reason) in &report.refused {
            writeln!(out, "{id}: {object} is refused: {reason}")?;
        }
    }
    bar.finish();
    if damaged > 0 {
        return Err(anyhow!("{damaged} packs are damaged"))
            .hint("muser pack rm removes one; its prompt is then computed anew");
    }
    console.note(format!("{} packs are whole, {:.2} MB", packs.len(), bytes as f64 / 1e6));
    Ok(())
}

fn export(place: &Place, args: &PackExportArgs, console: &Console) -> Result<()> {
    let library = place.open_existing()?;
    let id = find(&library, &args.pack)?;
    let key = args.key_out.clone().unwrap_or_else(|| {
        let mut name = args.file.clone().into_os_string();
        name.push(".key");
        PathBuf::from(name)
    });
    let cannot = |error| anyhow!("cannot create {}: {error}", args.file.display());
    if key.symlink_metadata().is_ok() {
        bail!("cannot create {}: it exists", key.display());
    }
    let mut options = OpenOptions::new();
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = options.write(true).create_new(true).open(&args.file).map_err(cannot)?;
    let mut file = BufWriter::new(file);
    let written = library.export(id, &mut file).map_err(anyhow::Error::from);
    let written = written.and_then(|(bytes, keys)| {
        file.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()?;
        KeyFile::create(&key, &keys)?;
        Ok(bytes)
    });
    match written {
        Ok(bytes) => console.note(format!(
            "{:.2} MB in {}, and the key that opens this file and no other in {}",
            bytes as f64 / 1e6,
            args.file.display(),
            key.display()
        )),
        Err(error) => {
            // Half a bundle is of no use.
            let _ = std::fs::remove_file(&args.file);
            return Err(error);
        }
    }
    Ok(())
}

fn import(place: &Place, args: &PackImportArgs, console: &Console) -> Result<()> {
    let library = place.open_with(&KeyFile::open_or_create(&place.key)?)?;
    if let Some(reason) = library.suspended() {
        bail!("{} cannot be used: {reason}", place.packs.display());
    }
    let source = match &args.source_key {
        Some(path) => KeyFile::open(path)?,
        None => (*library.keys()).clone(),
    };
    if source.id() != library.keys().id() && !args.trust {
        return Err(usage_error("a pack that another key has sealed is only taken with --trust")).hint(
            "whoever made it has chosen the keys and values that prompts with this beginning go on from, and these can say \
             anything: take packs only from people whose word you would also take for the model file",
        );
    }
    let imported = library.import(&args.file, &source, "", args.pin);
    let foreign = |error: &PackError| matches!(error.refusal(), Some(Refusal::ForeignKey { .. }));
    let published = match imported {
        Err(error) if foreign(&error) => {
            return Err(error).hint("give the key that was made with the file with --source-key");
        }
        other => other?,
    };
    writeln!(std::io::stdout().lock(), "{}", published.id)?;
    if published.existed {
        console.note("it was there already");
    }
    Ok(())
}

fn remove(place: &Place, args: &PackRmArgs, console: &Console) -> Result<()> {
    let library = place.open_existing()?;
    let packs: Vec<PackId> = if args.all {
        library.packs().iter().map(|pack| pack.id).collect()
    } else {
        args.packs_named.iter().map(|name| find(&library, name)).collect::<Result<_>>()?
    };
    let before = library.store().usage()?.held_bytes;
    for id in &packs {
        library.remove(*id)?;
    }
    let freed = before.saturating_sub(library.store().usage()?.held_bytes);
    console.note(format!("{} packs removed, {:.2} MB freed", packs.len(), freed as f64 / 1e6));
    Ok(())
}

fn collect(place: &Place, args: PackGcArgs, console: &Console) -> Result<()> {
    let max_bytes = match args.max_gb {
        Some(gb) if gb.is_finite() && gb >= 0.0 => Some((gb * 1e9) as u64),
        Some(gb) => bail!(usage_error(format!("--max-gb: expected 0 or more, found {gb}"))),
        None => None,
    };
    if place.open()?.is_none() {
        console.note(format!("no packs in {}", place.packs.display()));
        return Ok(());
    }
    let library = place.open_existing()?;
    let dropped = max_bytes.map_or(Ok(0), |bytes| library.shrink_to(bytes))?;
    let (objects, bytes) = match library.collect_garbage() {
        Err(PackError::Busy) => {
            return Err(PackError::Busy).hint("a running muser reads or writes packs; try again in a moment");
        }
        other => other?,
    };
    console.note(format!(
        "{dropped} packs dropped, {objects} unused objects deleted, {:.2} MB",
        bytes as f64 / 1e6
    ));
    Ok(())
}

fn key(place: &Place, command: PackKeyCommand, console: &Console) -> Result<()> {
    let keys = match command {
        PackKeyCommand::Show => place.keys()?,
        PackKeyCommand::Rotate { reseal } => {
            let (keys, epoch) = KeyFile::update(&place.key, KeyRing::rotate)?;
            if reseal && let Some(library) = place.open()? {
                let done = library.reseal()?;
                console.note(format!("{} packs and {} sessions are sealed anew", done.packs, done.records));
                if done.left > 0 {
                    console.warning(format!("{} could not be read and stay as they are", done.left));
                }
            }
            console.note(format!("epoch {epoch} seals from now on, in running servers too"));
            keys
        }
        PackKeyCommand::Revoke { epoch } => {
            let (keys, ()) = KeyFile::update(&place.key, |keys| keys.revoke(epoch))?;
            console.note(format!(
                "what was sealed in epoch {epoch} can never be read again; running servers stop reading it within a \
                 second"
            ));
            keys
        }
        PackKeyCommand::Minimum { epoch } => {
            KeyFile::update(&place.key, |keys| keys.set_minimum_epoch(epoch))?.0
        }
    };
    let mut out = std::io::stdout().lock();
    writeln!(out, "key    {}  {}", keys.id(), place.key.display())?;
    for epoch in keys.epochs() {
        let state = match (epoch.revoked, epoch.readable) {
            (true, _) => "revoked",
            (false, false) => "not read any more",
            (false, true) if epoch.number == keys.current_epoch() => "seals",
            (false, true) => "readable",
        };
        writeln!(out, "epoch  {}  made {} ago, {state}", epoch.number, age(epoch.created_unix_s))?;
    }
    Ok(())
}

/// How long ago, in the largest unit that says something.
fn age(unix_s: u64) -> String {
    let now =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let seconds = now.saturating_sub(unix_s);
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
