//! How two nodes come to know each other: one prints a code, the other one brings it, and each pins the other's key.
//!
//! The code is a hash of the inviting node's key and a secret of 128 bits, good for ten minutes and once. Whoever brings it sees
//! from the hash that it talks to the right node, and shows that it has the secret without sending it: both ends prove it over
//! both keys. No private key and no secret that is kept crosses the wire.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use subtle::ConstantTimeEq as _;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use crate::NodeError;
use crate::ids::{Digest, NodeKey};
use crate::private;
use crate::registry::{Entry, Registry, Rights, check_address};
use crate::secret::Secrets;
use crate::tls::{self, ENROL_ALPN};

/// How long a code is good.
pub const CODE_TIME: Duration = Duration::from_mins(10);
/// Codes that may be open at once.
const MOST_CODES: usize = 16;
/// Wrong proofs after which all codes are void.
const MOST_TRIES: u8 = 5;
const WAIT: Duration = Duration::from_secs(10);
const LETTERS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
/// Letters of a code: 16 bytes of hash, 16 of secret, 2 that find slips of the pen.
const CODE_LETTERS: usize = 55;

/// What `muser node invite` prints.
#[derive(Clone, PartialEq, Eq)]
pub struct Code {
    key_hash: [u8; 16],
    secret: [u8; 16],
}

impl Code {
    /// The same node's, with another secret.
    #[cfg(test)]
    pub(crate) fn break_secret(&mut self) {
        self.secret[0] ^= 1;
    }
}

impl std::fmt::Debug for Code {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Code(..)")
    }
}

fn key_hash(key: &NodeKey) -> [u8; 16] {
    let mut hash = [0; 16];
    hash.copy_from_slice(&blake3::derive_key("muser node v1 key hash", &key.0)[..16]);
    hash
}

impl std::fmt::Display for Code {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut bytes = [&self.key_hash[..], &self.secret].concat();
        let check = blake3::derive_key("muser node v1 code check", &bytes);
        bytes.extend_from_slice(&check[..2]);
        let (mut bits, mut count) = (0_u32, 0);
        let mut letters = 0;
        let mut put = |f: &mut std::fmt::Formatter<'_>, index: u32| {
            if letters > 0 && letters % 11 == 0 {
                f.write_str("-")?;
            }
            letters += 1;
            write!(f, "{}", char::from(LETTERS[index as usize & 31]))
        };
        for byte in bytes {
            bits = bits << 8 | u32::from(byte);
            count += 8;
            while count >= 5 {
                count -= 5;
                put(f, bits >> count)?;
            }
        }
        if count > 0 { put(f, bits << (5 - count)) } else { Ok(()) }
    }
}

impl std::str::FromStr for Code {
    type Err = NodeError;

    fn from_str(text: &str) -> Result<Self, NodeError> {
        let wrong = |found: String| {
            NodeError::caller(
                "the code",
                "what `muser node invite` printed, five groups of letters and digits",
                found,
            )
        };
        let letters: Vec<u8> =
            text.bytes().filter(|byte| *byte != b'-').map(|byte| byte.to_ascii_lowercase()).collect();
        if letters.len() != CODE_LETTERS {
            return Err(wrong(format!("{} letters of {CODE_LETTERS}", letters.len())));
        }
        let (mut bits, mut count, mut bytes) = (0_u32, 0, Vec::new());
        for letter in letters {
            let index = LETTERS.iter().position(|known| *known == letter);
            let index = index.ok_or_else(|| wrong("a letter that is in no code".into()))?;
            bits = (bits << 5 | index as u32) & 0xFFFF;
            count += 5;
            if count >= 8 {
                count -= 8;
                bytes.push((bits >> count) as u8);
            }
        }
        let check = blake3::derive_key("muser node v1 code check", &bytes[..32]);
        if bytes[32..34] != check[..2] || bits & ((1 << count) - 1) != 0 {
            return Err(wrong("one with a slip of the pen".into()));
        }
        let mut code = Self { key_hash: [0; 16], secret: [0; 16] };
        code.key_hash.copy_from_slice(&bytes[..16]);
        code.secret.copy_from_slice(&bytes[16..32]);
        Ok(code)
    }
}

/// An open invitation: kept as a key that the secret makes, not the secret.
#[derive(Clone, Copy)]
struct Invitation {
    key: Digest,
    until_s: u64,
    rights: Rights,
    tries: u8,
}

const INVITATION_BYTES: usize = 32 + 8 + 1 + 1;

fn invitations_path(home: &Path) -> PathBuf {
    home.join("keys").join("node.invitations")
}

fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// The invitations that are still good.
fn read_invitations(home: &Path) -> Result<Vec<Invitation>, NodeError> {
    let path = invitations_path(home);
    let limit = (MOST_CODES * INVITATION_BYTES) as u64;
    let Some(bytes) = private::read(&path, limit)? else { return Ok(Vec::new()) };
    if bytes.len() % INVITATION_BYTES != 0 {
        return Err(NodeError::file(path, "it is damaged; removing it voids all open codes"));
    }
    let now = unix_s();
    let all = bytes.chunks_exact(INVITATION_BYTES).map(|bytes| {
        let mut key = [0; 32];
        key.copy_from_slice(&bytes[..32]);
        let mut until = [0; 8];
        until.copy_from_slice(&bytes[32..40]);
        let rights = Rights { prefill: bytes[40] & 1 != 0, sessions: bytes[40] & 2 != 0 };
        Invitation { key, until_s: u64::from_le_bytes(until), rights, tries: bytes[41] }
    });
    // Good neither when its time is over nor when the clock was turned back by more than it had.
    let is_good = |one: &Invitation| one.until_s > now && one.until_s <= now + CODE_TIME.as_secs();
    Ok(all.filter(is_good).collect())
}

fn write_invitations(home: &Path, all: &[Invitation]) -> Result<(), NodeError> {
    let bytes: Vec<u8> = all
        .iter()
        .flat_map(|one| {
            let rights = u8::from(one.rights.prefill) | u8::from(one.rights.sessions) << 1;
            [&one.key[..], &one.until_s.to_le_bytes(), &[rights, one.tries]].concat()
        })
        .collect();
    private::write(&invitations_path(home), &bytes)
}

/// Makes a code, with which one node may enrol and then do what `rights` says.
///
/// # Errors
/// If files cannot be used, or too many codes are open.
pub fn invite(home: &Path, rights: Rights) -> Result<Code, NodeError> {
    let key = Secrets::open_or_create(home)?.current.key();
    let mut secret = [0; 16];
    aws_lc_rs::rand::fill(&mut secret).map_err(|_| NodeError::System("no random bytes".into()))?;
    let _lock = private::lock(&invitations_path(home))?;
    let mut all = read_invitations(home)?;
    if all.len() >= MOST_CODES {
        return Err(NodeError::caller("codes that are open", format!("at most {MOST_CODES}"), "one more"));
    }
    let until_s = unix_s() + CODE_TIME.as_secs();
    all.push(Invitation { key: secret_key(&secret), until_s, rights, tries: 0 });
    write_invitations(home, &all)?;
    Ok(Code { key_hash: key_hash(&key), secret })
}

/// Is a code open?
pub(crate) fn is_invited(home: &Path) -> bool {
    read_invitations(home).is_ok_and(|all| !all.is_empty())
}

fn secret_key(secret: &[u8; 16]) -> Digest {
    blake3::derive_key("muser node v1 invitation", secret)
}

/// That whoever says this has the secret: for this pair of keys, in this direction, on this TLS connection.
fn proof(key: &Digest, who: &[u8], binding: &[u8; 32], inviting: NodeKey, coming: NodeKey) -> Digest {
    let mut hasher = blake3::Hasher::new_keyed(key);
    hasher.update(who).update(binding).update(&inviting.0).update(&coming.0);
    *hasher.finalize().as_bytes()
}

/// What both ends of a TLS connection know and nobody else.
fn binding<Data>(common: &rustls::ConnectionCommon<Data>) -> std::io::Result<[u8; 32]> {
    let exported = common.export_keying_material([0; 32], b"EXPORTER-muser-node-enrol", None);
    exported.map_err(std::io::Error::other)
}

const COMES: &[u8] = b"comes";
const INVITES: &[u8] = b"invites";
/// Answers to a proof.
const TAKEN: u8 = 1;
const NOT_TAKEN: u8 = 2;
const KNOWN: u8 = 3;

/// The coming node's name for itself, and where it can be reached; both may be empty.
async fn read_text(from: &mut (impl AsyncRead + Unpin)) -> std::io::Result<String> {
    let mut text = vec![0; usize::from(from.read_u8().await?)];
    from.read_exact(&mut text).await?;
    let text = String::from_utf8(text).map_err(std::io::Error::other)?;
    let is_plain = text.bytes().all(|byte| byte.is_ascii_graphic());
    if is_plain { Ok(text) } else { Err(std::io::Error::other("a name that is none")) }
}

async fn write_text(to: &mut (impl AsyncWrite + Unpin), text: &str) -> std::io::Result<()> {
    to.write_u8(text.len() as u8).await?;
    to.write_all(text.as_bytes()).await
}

/// The inviting side: gives the name under which the coming node is known here now.
pub(crate) async fn answer(
    home: &Path,
    own: NodeKey,
    mut stream: tokio_rustls::server::TlsStream<tokio::net::TcpStream>,
    coming: NodeKey,
) -> std::io::Result<String> {
    let binding = binding(stream.get_ref().1)?;
    let name = read_text(&mut stream).await?;
    let mut theirs = [0; 32];
    stream.read_exact(&mut theirs).await?;
    let taken = take(home, own, coming, &name, &binding, &theirs).map_err(std::io::Error::other)?;
    let (word, key) = match &taken {
        Taken::Yes { key, .. } => (TAKEN, Some(*key)),
        Taken::No => (NOT_TAKEN, None),
        Taken::Known => (KNOWN, None),
    };
    stream.write_u8(word).await?;
    if let Some(key) = key {
        stream.write_all(&proof(&key, INVITES, &binding, own, coming)).await?;
    }
    stream.flush().await?;
    stream.shutdown().await?;
    match taken {
        Taken::Yes { name, .. } => Ok(name),
        Taken::No | Taken::Known => Err(std::io::Error::other("the code is not taken")),
    }
}

enum Taken {
    Yes { name: String, key: Digest },
    No,
    Known,
}

/// Uses a code up, and pins who brought it.
fn take(
    home: &Path,
    own: NodeKey,
    coming: NodeKey,
    name: &str,
    binding: &[u8; 32],
    theirs: &Digest,
) -> Result<Taken, NodeError> {
    let _lock = private::lock(&invitations_path(home))?;
    let mut all = read_invitations(home)?;
    let is_right = |one: &Invitation| bool::from(proof(&one.key, COMES, binding, own, coming).ct_eq(theirs));
    let Some(at) = all.iter().position(is_right) else {
        // Guessing 128 bits is hopeless; a few tries are for slips, the rest for nobody.
        all.iter_mut().for_each(|one| one.tries += 1);
        all.retain(|one| one.tries < MOST_TRIES);
        write_invitations(home, &all)?;
        return Ok(Taken::No);
    };
    let invitation = all.swap_remove(at);
    write_invitations(home, &all)?;
    let added = Registry::update(home, |registry| {
        if coming == own || registry.by_key(&coming).is_some() {
            return Ok(None);
        }
        let name = free_name(registry, name, &coming);
        registry.add(Entry::new(&name, None, coming, invitation.rights))?;
        Ok(Some(name))
    })?;
    Ok(added.map_or(Taken::Known, |name| Taken::Yes { name, key: invitation.key }))
}

/// The name that a node gives itself, or with a part of its key if that is taken or none.
fn free_name(registry: &Registry, wanted: &str, key: &NodeKey) -> String {
    let mut free = Registry::default();
    let is_good = free.add(Entry::new(wanted, None, *key, Rights::default())).is_ok();
    let short = &key.to_string()[..8];
    match registry.named(wanted) {
        Err(_) if is_good => wanted.to_owned(),
        Ok(_) if wanted.len() <= 50 => format!("{wanted}-{short}"),
        _ => format!("node-{short}"),
    }
}

/// Brings a code to the node that printed it: pins it as `name`, with `rights` here, and gets pinned there.
///
/// # Errors
/// If the name is taken, the address is none, the node there is another one, or it does not take the code.
pub async fn add(
    home: &Path,
    name: &str,
    address: &str,
    code: &Code,
    own_name: &str,
    rights: Rights,
) -> Result<NodeKey, NodeError> {
    check_address(address)?;
    let secrets = Secrets::open_or_create(home)?;
    let own = secrets.current.key();
    if code.key_hash == key_hash(&own) {
        return Err(NodeError::caller("the code", "that of another node", "this node's own"));
    }
    // Before anything is used up: would it be taken here?
    let placeholder = NodeKey([0; 32]);
    Registry::read(home)?.add(Entry::new(name, Some(address.to_owned()), placeholder, rights))?;
    let hash = code.key_hash;
    let seen = Arc::new(std::sync::Mutex::new(None));
    let shown = Arc::clone(&seen);
    let trusts: tls::Trusts = Arc::new(move |key| {
        *crate::conn::lock(&shown) = Some(*key);
        key_hash(key) == hash
    });
    let config = tls::client(&secrets.current, trusts, ENROL_ALPN)?;
    let unreachable = |reason: String| NodeError::Unreachable { address: address.to_owned(), reason };
    let connected = tokio::time::timeout(WAIT, crate::dial::connect(config, address)).await;
    let key = *crate::conn::lock(&seen);
    let mut stream = match connected {
        Ok(Ok(stream)) => stream,
        Ok(Err(reason)) => {
            return Err(match key.filter(|key| key_hash(key) != hash) {
                Some(key) => NodeError::WrongKey {
                    address: address.to_owned(),
                    expected: "the one whose hash the code has".into(),
                    found: key.to_string(),
                },
                None => unreachable(format!(
                    "{reason} (it takes nobody without an open code: `muser node invite` there)"
                )),
            });
        }
        Err(_) => return Err(unreachable("no answer in ten seconds".into())),
    };
    let key = key.ok_or_else(|| unreachable("it showed no key".into()))?;
    let exchanged = tokio::time::timeout(WAIT, bring(&mut stream, code, key, own, own_name)).await;
    let exchanged = exchanged.map_err(|_| unreachable("no answer in ten seconds".into()))?;
    match exchanged.map_err(|error| unreachable(error.to_string()))? {
        TAKEN => {}
        KNOWN => {
            let reason =
                "it knows this node already, under another name; `muser node remove` there, then a new code";
            return Err(NodeError::Code { address: address.to_owned(), reason: reason.into() });
        }
        _ => {
            let reason = "it is wrong, was used, or is older than ten minutes; `muser node invite` there makes a new one";
            return Err(NodeError::Code { address: address.to_owned(), reason: reason.into() });
        }
    }
    Registry::update(home, |registry| registry.add(Entry::new(name, Some(address.to_owned()), key, rights)))?;
    Ok(key)
}

/// The coming side of the exchange: the answer's word.
async fn bring(
    stream: &mut tokio_rustls::client::TlsStream<tokio::net::TcpStream>,
    code: &Code,
    inviting: NodeKey,
    own: NodeKey,
    own_name: &str,
) -> std::io::Result<u8> {
    let binding = binding(stream.get_ref().1)?;
    let key = secret_key(&code.secret);
    write_text(stream, &own_name[..own_name.len().min(63)]).await?;
    stream.write_all(&proof(&key, COMES, &binding, inviting, own)).await?;
    stream.flush().await?;
    let word = stream.read_u8().await?;
    if word == TAKEN {
        let mut theirs = [0; 32];
        stream.read_exact(&mut theirs).await?;
        let is_right: bool = proof(&key, INVITES, &binding, inviting, own).ct_eq(&theirs).into();
        if !is_right {
            return Err(std::io::Error::other("it does not have the code's secret"));
        }
    }
    Ok(word)
}
