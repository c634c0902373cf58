//! A relay that does to connections what networks do. For tests of this crate and of those that glue it to an engine (feature
//! `testing`): the address of a relay is dialled instead of the node's.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use crate::{Secrets, tls};

/// What happens to the bytes, counted over both directions and all connections of a relay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Bytes a second of each connection in each direction; `None`: as fast as it goes.
    pub rate: Option<u64>,
    /// Every byte comes this much later.
    pub delay: Duration,
    /// Every second connection's bytes come this much later still, so that streams overtake each other.
    pub skew: Duration,
    /// After so many bytes what is to happen, once.
    pub after: Option<(u64, Fault)>,
}

/// What happens once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// All connections are cut.
    Cut,
    /// Nothing passes any more on the connections that are open, and nobody hears of it.
    HalfOpen,
    /// Nothing passes for a while.
    Stall(Duration),
    /// One bit, below TLS.
    Flip,
    /// Some bytes twice, below TLS.
    Double,
    /// Some bytes are left out, below TLS.
    Drop,
}

impl Faults {
    /// One of many, from a seed: within `bytes` something happens.
    pub fn random(seed: u64, bytes: u64) -> Self {
        let mut state = seed;
        let mut below = |n: u64| {
            // SplitMix64: the same seed gives the same faults everywhere.
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            (z ^ (z >> 31)) % n
        };
        let fault = match below(6) {
            0 => Fault::Cut,
            1 => Fault::HalfOpen,
            2 => Fault::Stall(Duration::from_millis(50 + below(2500))),
            3 => Fault::Flip,
            4 => Fault::Double,
            _ => Fault::Drop,
        };
        Self {
            rate: (below(3) == 0).then(|| 200_000 + below(5_000_000)),
            delay: Duration::from_millis(if below(3) == 0 { below(100) } else { 0 }),
            skew: Duration::from_millis(if below(3) == 0 { below(60) } else { 0 }),
            after: (below(8) != 0).then(|| (below(bytes.max(1)), fault)),
        }
    }
}

struct Shared {
    target: Mutex<SocketAddr>,
    faults: Mutex<Faults>,
    passed: AtomicU64,
    refuses: AtomicBool,
    /// A new number cuts what has an older one.
    generation: AtomicU64,
    /// Connections so far.
    count: AtomicU64,
    /// Connections up to a number, and until when nothing passes on them; `None`: for ever.
    stalled: Mutex<Option<(u64, Option<Instant>)>>,
    changed: Notify,
}

/// See the module. Dropping it cuts everything.
pub struct Relay {
    address: SocketAddr,
    shared: Arc<Shared>,
    listening: tokio::task::AbortHandle,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Relay {
    /// A relay on a free port of this machine.
    pub async fn start(target: SocketAddr, faults: Faults) -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            target: Mutex::new(target),
            faults: Mutex::new(faults),
            passed: AtomicU64::new(0),
            refuses: AtomicBool::new(false),
            generation: AtomicU64::new(0),
            count: AtomicU64::new(0),
            stalled: Mutex::new(None),
            changed: Notify::new(),
        });
        let accepting = Arc::clone(&shared);
        let listening = tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let count = accepting.count.fetch_add(1, Ordering::SeqCst) + 1;
                if !accepting.refuses.load(Ordering::SeqCst) {
                    tokio::spawn(connect(Arc::clone(&accepting), near, count));
                }
            }
        });
        Ok(Self { address, shared, listening: listening.abort_handle() })
    }

    /// Where to dial.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Bytes that have passed.
    pub fn passed(&self) -> u64 {
        self.shared.passed.load(Ordering::SeqCst)
    }

    /// Other faults from now on; bytes are counted anew.
    pub fn set(&self, faults: Faults) {
        self.shared.passed.store(0, Ordering::SeqCst);
        *lock(&self.shared.faults) = faults;
    }

    /// New connections go elsewhere.
    pub fn point_to(&self, target: SocketAddr) {
        *lock(&self.shared.target) = target;
    }

    /// Cuts what is open.
    pub fn cut(&self) {
        self.shared.cut();
    }

    /// Are new connections closed at once?
    pub fn refuse(&self, refuses: bool) {
        self.shared.refuses.store(refuses, Ordering::SeqCst);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.listening.abort();
        self.shared.cut();
    }
}

impl Shared {
    fn cut(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
        self.changed.notify_waiters();
    }

    /// Something happens now, if it is time.
    fn pass(&self, bytes: &mut Vec<u8>) {
        let before = self.passed.fetch_add(bytes.len() as u64, Ordering::SeqCst);
        let due = {
            let mut faults = lock(&self.faults);
            let is_due = faults.after.is_some_and(|(at, _)| before + bytes.len() as u64 > at);
            if is_due { faults.after.take().map(|(_, fault)| fault) } else { None }
        };
        let count = self.count.load(Ordering::SeqCst);
        let middle = bytes.len() / 2;
        match due {
            None => {}
            Some(Fault::Cut) => self.cut(),
            Some(Fault::HalfOpen) => *lock(&self.stalled) = Some((count, None)),
            Some(Fault::Stall(time)) => {
                *lock(&self.stalled) = Some((count, Some(Instant::now() + time)));
            }
            Some(Fault::Flip) => bytes[middle] ^= 4,
            Some(Fault::Double) => bytes.extend_from_within(middle..),
            Some(Fault::Drop) => bytes.truncate(middle),
        }
    }

    /// Until when nothing passes; `Err`: for ever.
    fn stalled(&self, number: u64) -> Result<Option<Instant>, ()> {
        match *lock(&self.stalled) {
            Some((of, until)) if number <= of => until.map(Some).ok_or(()),
            _ => Ok(None),
        }
    }
}

async fn connect(shared: Arc<Shared>, near: TcpStream, number: u64) {
    let target = *lock(&shared.target);
    let Ok(far) = TcpStream::connect(target).await else { return };
    let _ = (near.set_nodelay(true), far.set_nodelay(true));
    let generation = shared.generation.load(Ordering::SeqCst);
    let (near_from, near_to) = near.into_split();
    let (far_from, far_to) = far.into_split();
    tokio::spawn(pump(Arc::clone(&shared), near_from, far_to, generation, number));
    tokio::spawn(pump(shared, far_from, near_to, generation, number));
}

async fn pump(
    shared: Arc<Shared>,
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    generation: u64,
    number: u64,
) {
    let (give, mut take) = mpsc::channel::<(Instant, Vec<u8>)>(256);
    let writing = Arc::clone(&shared);
    let writer = tokio::spawn(async move {
        while let Some((at, bytes)) = take.recv().await {
            tokio::time::sleep_until(at).await;
            match writing.stalled(number) {
                Ok(None) => {}
                Ok(Some(until)) => tokio::time::sleep_until(until).await,
                // Kept open, and never written to again.
                Err(()) => std::future::pending().await,
            }
            if writing.generation.load(Ordering::SeqCst) != generation || to.write_all(&bytes).await.is_err()
            {
                return;
            }
        }
        let _ = to.shutdown().await;
    });
    let mut free_at = Instant::now();
    loop {
        let changed = shared.changed.notified();
        if shared.generation.load(Ordering::SeqCst) != generation {
            break;
        }
        let mut bytes = vec![0; 16 << 10];
        let read = tokio::select! {
            read = from.read(&mut bytes) => read,
            () = changed => continue,
        };
        let Ok(count @ 1..) = read else { break };
        bytes.truncate(count);
        shared.pass(&mut bytes);
        let (rate, delay) = {
            let faults = lock(&shared.faults);
            let skew = if number.is_multiple_of(2) { faults.skew } else { Duration::ZERO };
            (faults.rate, faults.delay + skew)
        };
        let now = Instant::now();
        free_at = free_at.max(now);
        if let Some(rate) = rate {
            free_at += Duration::from_secs_f64(bytes.len() as f64 / rate as f64);
            tokio::time::sleep_until(free_at).await;
        }
        if give.send((free_at + delay, bytes)).await.is_err() {
            break;
        }
    }
    let is_cut = shared.generation.load(Ordering::SeqCst) != generation;
    if is_cut {
        writer.abort();
    }
}

/// Seconds that `bytes` take from one node's key to another's through TLS and nothing else, on loopback: what the rate of
/// transfers is compared with.
pub async fn bare_tls_seconds(from: &Path, to: &Path, bytes: u64) -> std::io::Result<f64> {
    const PIECE: usize = 256 << 10;
    let failed = |error: crate::NodeError| std::io::Error::other(error.to_string());
    let secrets = [from, to].map(|home| Secrets::open_or_create(home).map_err(failed));
    let [from, to] = secrets;
    let trusts: tls::Trusts = Arc::new(|_| true);
    let server = tls::server(&from?.current, Arc::clone(&trusts), tls::ALPN).map_err(failed)?;
    let client = tls::client(&to?.current, trusts, tls::ALPN).map_err(failed)?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?.to_string();
    let sending = tokio::spawn(async move {
        let (stream, _) = listener.accept().await?;
        let mut stream = tokio_rustls::TlsAcceptor::from(Arc::new(server)).accept(stream).await?;
        let piece = vec![7; PIECE];
        let mut left = bytes as usize;
        while left > 0 {
            stream.write_all(&piece[..left.min(PIECE)]).await?;
            left -= left.min(PIECE);
        }
        stream.flush().await?;
        stream.shutdown().await
    });
    let mut stream = crate::dial::connect(client, &address).await.map_err(std::io::Error::other)?;
    let began = Instant::now();
    let (mut buffer, mut left) = (vec![0; PIECE], bytes as usize);
    while left > 0 {
        let piece = left.min(PIECE);
        stream.read_exact(&mut buffer[..piece]).await?;
        left -= piece;
    }
    let took = began.elapsed().as_secs_f64();
    sending.await.map_err(std::io::Error::other)??;
    Ok(took)
}
