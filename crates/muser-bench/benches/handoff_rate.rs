//! How fast rows go from one node to another on loopback, beside the same bytes through bare TLS with the same library and keys:
//! `cargo bench -p muser-bench --bench handoff_rate -- [POSITIONS] [STREAMS]`. Prints both rates, processor time
//! (of both sides together) and the ratio for each repetition, and the median. Each side wants two cores of its own: where there
//! are fewer the digests take their time from TLS.

use std::error::Error;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use muser_backend::arith::attention::Digits;
use muser_handoff::{
    Answer, Component, Ended, Entry, Facts, Fetch, FetchEnd, Load, Node, NodeConfig, Nonce, Outlet, Peer,
    Peers, Place, Plane, Planes, Quote, Registry, Request, Rights, Secrets, Series, Serving, Sink, Span,
    Wanted, testing::bare_tls_seconds,
};
use muser_kv::KvGroup;

const WINDOW: u32 = 2048;

/// Layers of the 30B model.
fn planes() -> Result<Planes, Box<dyn Error>> {
    let plane = |group, layers| Plane {
        group,
        component: Component::Target,
        layers,
        heads: 2,
        dim: 128,
        digits: Digits::Two,
    };
    Ok(Planes::new(vec![plane(KvGroup::Full, 13), plane(KvGroup::Sliding, 39)])?)
}

struct Engine(Planes);

impl Serving for Engine {
    fn facts(&self) -> Facts {
        Facts {
            serves_prefill: true,
            serves_sessions: false,
            max_positions: 131_072,
            identity: [1; 32],
            draft: [0; 32],
            semantic: [2; 32],
            window: WINDOW,
            planes: self.0.clone(),
            route: "made up".into(),
            build: "rate".into(),
            parts: Vec::new(),
        }
    }

    fn load(&self) -> Load {
        Load::default()
    }

    fn quote(&self, _: &Peer, _: Quote, _: Answer) {}

    fn request(&self, _: &Peer, _: Arc<Request>, outlet: Arc<dyn Outlet>) {
        let planes = self.0.clone();
        std::thread::spawn(move || give(&planes, &*outlet));
    }
}

fn give(planes: &Planes, outlet: &dyn Outlet) -> Result<(), Ended> {
    outlet.begin(&[])?;
    let blocks = [KvGroup::Full, KvGroup::Sliding].map(|group| vec![7; planes.block_bytes(group)]);
    for (group, block) in outlet.plan().blocks() {
        outlet.block(group, block, &blocks[usize::from(group == KvGroup::Sliding)])?;
    }
    Ok(())
}

/// Memory that rows are copied to, as an engine's would be.
struct Taker {
    memory: Mutex<Vec<u8>>,
    heard: mpsc::Sender<Option<u32>>,
}

impl Sink for Taker {
    fn begun(&self, _: &[u32]) {}

    fn chunk(&self, _: &Place, rows: &[u8]) -> bool {
        self.memory.lock().is_ok_and(|mut memory| {
            memory[..rows.len()].copy_from_slice(rows);
            true
        })
    }

    fn ready(&self, boundary: u32) {
        let _ = self.heard.send(Some(boundary));
    }

    fn progress(&self, _: u32, _: Option<Duration>) {}

    fn ended(&self, _: Series, end: FetchEnd) {
        if end != FetchEnd::Installed {
            tracing::error!("{end}");
        }
        let _ = self.heard.send(None);
    }
}

fn fetch_seconds(node: &Node, planes: &Planes, positions: u32) -> Result<(f64, u64), Box<dyn Error>> {
    let wanted = Wanted {
        identity: [1; 32],
        draft: [0; 32],
        tenant: [0; 32],
        ids: (0..positions).collect(),
        planes: planes.clone(),
        span: Span { cut: positions, stages: Vec::new(), window: WINDOW },
    };
    let series = Series::new(Nonce::fresh().ok_or("no random bytes")?, wanted, |_, _| false)?;
    let bytes = series.plan().bytes_of(&(0..series.plan().chunks()).into());
    let (heard, hears) = mpsc::channel();
    let taker = Arc::new(Taker { memory: Mutex::new(vec![0; 1 << 20]), heard });
    let began = Instant::now();
    let fetching =
        node.fetch("other", Fetch { series, budget: Duration::from_mins(5), priority: 128 }, taker);
    while let Some(boundary) = hears.recv()? {
        fetching.installed(boundary);
    }
    Ok((began.elapsed().as_secs_f64(), bytes))
}

/// Processor time of this process so far, in hundredths of a second; 0 where the system does not say.
fn processor_time() -> u64 {
    let said = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = said.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum()
}

#[expect(clippy::print_stdout, reason = "it is what the program is for")]
fn main() -> Result<(), Box<dyn Error>> {
    let positions: u32 = muser_bench::arguments().next().map_or(Ok(32_768), |text| text.parse())?;
    let streams: u8 = muser_bench::arguments().nth(1).map_or(Ok(1), |text| text.parse())?;
    let runtime = tokio::runtime::Runtime::new()?;
    let planes = planes()?;
    let homes = [tempfile::tempdir()?, tempfile::tempdir()?];
    let [far_home, near_home] = homes.each_ref().map(tempfile::TempDir::path);
    let key = |home| Secrets::open_or_create(home).map(|secrets| secrets.current.key());
    let rights = Rights { prefill: true, sessions: false };
    Registry::update(far_home, |registry| registry.add(Entry::new("near", None, key(near_home)?, rights)))?;
    let listen = vec!["127.0.0.1:0".parse()?];
    let far = NodeConfig { home: far_home.to_owned(), listen, dial: false };
    let far = runtime.block_on(Node::start(far, Arc::new(Engine(planes.clone()))))?;
    let address = far.addresses().first().ok_or("no address")?.to_string();
    let entry = Entry { streams, ..Entry::new("other", Some(address), key(far_home)?, rights) };
    Registry::update(near_home, |registry| registry.add(entry))?;
    let near = NodeConfig { home: near_home.to_owned(), listen: Vec::new(), dial: true };
    let near = runtime.block_on(Node::start(near, Arc::new(Engine(planes.clone()))))?;
    while !near.list().iter().any(|peer| peer.connected && peer.hello.is_some()) {
        std::thread::sleep(Duration::from_millis(10));
    }
    fetch_seconds(&near, &planes, positions)?;
    let mut ratios = Vec::new();
    for _ in 0..5 {
        let began = processor_time();
        let (seconds, bytes) = fetch_seconds(&near, &planes, positions)?;
        let between = processor_time();
        let bare = runtime.block_on(bare_tls_seconds(far_home, near_home, bytes))?;
        let rate = |seconds: f64| bytes as f64 / seconds / 1e6;
        ratios.push(bare / seconds);
        let (ours, theirs) = (between - began, processor_time() - between);
        println!(
            "{bytes} bytes: {:.0} MB/s in {ours}0 ms of processors, bare TLS {:.0} MB/s in {theirs}0 ms, ratio {:.3}",
            rate(seconds),
            rate(bare),
            bare / seconds
        );
    }
    ratios.sort_by(f64::total_cmp);
    println!("median ratio {:.3} with {streams} streams", ratios[2]);
    Ok(())
}
