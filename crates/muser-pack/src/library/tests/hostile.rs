//! Bytes that somebody changed: each change is refused, each with its own reason, and nothing of it is seen.

use super::*;
use crate::kind::Kind;
use crate::object::{Spec, seal};
use crate::{Area, ObjectName};

/// A store with one pack of one and a half blocks.
struct Victim {
    store: MemoryStore,
    keys: KeyRing,
    units: Vec<PositionKey>,
    id: PackId,
}

impl Victim {
    fn new() -> Self {
        let (store, keys) = (MemoryStore::new(), keys());
        let library = library(&store, &keys);
        let units = prompt(300, 0, 5);
        let id = publish(&library, &library.scope(identity(), ""), &units).expect("published").id;
        Self { store, keys, units, id }
    }

    fn library(&self) -> Library {
        library(&self.store, &self.keys)
    }

    fn segment(&self, library: &Library, group: KvGroup, index: usize) -> Segment {
        let scope = library.scope(identity(), "");
        let plan = library.longest(&scope, &self.units, 300, false).expect("found");
        let wanted = |segment: &&Segment| segment.group == group && segment.index == index;
        *plan.segments.iter().find(wanted).expect("part of the plan")
    }

    /// Why a changed manifest is not used, by opening the store anew. It must not be found.
    fn manifest_refusal(&self, bytes: Vec<u8>) -> &'static str {
        let name = self.id.object();
        let original = self.store.bytes(&name).expect("there");
        self.store.tamper(&name, bytes);
        let library = self.library();
        let scope = library.scope(identity(), "");
        assert!(library.longest(&scope, &self.units, 300, false).is_none(), "a changed manifest is used");
        let refused: Vec<_> = library.counters().snapshot().refused().collect();
        self.store.tamper(&name, original);
        let [(reason, 1)] = refused[..] else { panic!("{refused:?}") };
        reason
    }

    /// Why a changed segment is not restored. The buffer must hold nothing of it that was not authentic.
    fn segment_refusal(&self, library: &Library, segment: &Segment, bytes: Vec<u8>) -> &'static str {
        let name = segment.id.object();
        let original = self.store.bytes(&name).expect("there");
        self.store.tamper(&name, bytes);
        let scope = library.scope(identity(), "");
        let mut out = vec![0; segment.bytes];
        let refused = library.fetch(&scope, segment, &mut out).expect_err("a changed segment is restored");
        self.store.tamper(&name, original);
        let reason = refused.refusal().unwrap_or_else(|| panic!("{refused}"));
        if let Refusal::Chunk { index } = reason {
            assert!(
                out[*index as usize * 4096..].iter().all(|&byte| byte == 0),
                "a refused chunk is visible"
            );
        } else {
            assert!(out.iter().all(|&byte| byte == 0), "bytes of a refused object are visible");
        }
        reason.name()
    }
}

/// The reasons that a flipped bit at `offset` of an object may have.
fn reasons(offset: usize, header_bytes: usize) -> &'static [&'static str] {
    match offset {
        0..8 => &["not_a_pack"],
        8..10 => &["version"],
        // Kind and sealing may become other valid values: then the code over the header tells.
        10..12 | 20..40 => &["malformed", "over_limit", "header", "truncated", "trailing"],
        12..16 | 44..48 => &["malformed"],
        16..20 => &["unknown_epoch"],
        40..44 => &["header"],
        48..64 => &["foreign_key"],
        offset if offset < header_bytes => &["header"],
        _ => &["chunk"],
    }
}

/// `MUSER_TEST_LONG=1` tries every bit of everything.
fn long() -> bool {
    muser_testkit::is_long()
}

#[test]
fn every_truncation_is_refused() {
    let victim = Victim::new();
    let library = victim.library();
    for segment in [(KvGroup::Full, 0), (KvGroup::Sliding, 1)].map(|at| victim.segment(&library, at.0, at.1))
    {
        let bytes = victim.store.bytes(&segment.id.object()).expect("there");
        for len in 0..bytes.len() {
            let reason = victim.segment_refusal(&library, &segment, bytes[..len].to_vec());
            assert_eq!(reason, "truncated", "{len} of {} bytes", bytes.len());
        }
        for more in [1, 4096] {
            let longer = [&bytes[..], &vec![0; more]].concat();
            assert_eq!(victim.segment_refusal(&library, &segment, longer), "trailing");
        }
    }
    let bytes = victim.store.bytes(&victim.id.object()).expect("there");
    for len in 0..bytes.len() {
        assert_eq!(victim.manifest_refusal(bytes[..len].to_vec()), "truncated", "{len} bytes");
    }
    assert_eq!(victim.manifest_refusal([&bytes[..], &[0]].concat()), "trailing");
}

#[test]
fn every_flipped_bit_is_refused() {
    let victim = Victim::new();
    let library = victim.library();
    for segment in [(KvGroup::Full, 0), (KvGroup::Sliding, 1)].map(|at| victim.segment(&library, at.0, at.1))
    {
        let mut bytes = victim.store.bytes(&segment.id.object()).expect("there");
        let all = long() || segment.group == KvGroup::Full;
        for offset in 0..bytes.len() {
            for bit in if all { 0..8 } else { offset % 8..offset % 8 + 1 } {
                bytes[offset] ^= 1 << bit;
                let reason = victim.segment_refusal(&library, &segment, bytes.clone());
                assert!(reasons(offset, 4096).contains(&reason), "byte {offset}, bit {bit}: {reason}");
                bytes[offset] ^= 1 << bit;
            }
        }
    }
    let mut bytes = victim.store.bytes(&victim.id.object()).expect("there");
    for offset in 0..bytes.len() {
        // Each bit of the fields, one bit of each other byte: opening a store for each takes its time.
        for bit in if long() || offset < 192 { 0..8 } else { offset % 8..offset % 8 + 1 } {
            bytes[offset] ^= 1 << bit;
            let reason = victim.manifest_refusal(bytes.clone());
            assert!(reasons(offset, 4096).contains(&reason), "byte {offset}, bit {bit}: {reason}");
            bytes[offset] ^= 1 << bit;
        }
    }
}

/// A pack of more than 1 MiB: with `MUSER_TEST_LONG=1` every length and every bit of all of its segments, else a sample.
#[test]
fn no_bit_and_no_length_of_a_megabyte_is_accepted() {
    let mut victim = Victim::new();
    let library = victim.library();
    let scope = library.scope(identity(), "");
    victim.units = prompt(40 * BLOCK_LEN, 0, 9);
    victim.id = publish(&library, &scope, &victim.units).expect("published").id;
    let plan = library.longest(&scope, &victim.units, victim.units.len(), true).expect("found");
    // The plan has the sliding segments of one window; the others are other plans'.
    let mut segments = plan.segments.clone();
    for blocks in 1..40 {
        let plan = library.longest(&scope, &victim.units, blocks * BLOCK_LEN, true).expect("found");
        segments.extend(plan.segments.iter().filter(|one| one.group == KvGroup::Sliding));
    }
    segments.sort_by_key(|one| one.id.0);
    segments.dedup_by_key(|one| one.id.0);
    let size = |segment: &Segment| victim.store.bytes(&segment.id.object()).expect("there").len();
    let total: usize = segments.iter().map(size).sum();
    assert!(segments.len() == 80 && total >= 1 << 20, "{} segments, {total} bytes", segments.len());
    let step = if long() { 1 } else { 1009 };
    for segment in &segments {
        let mut bytes = victim.store.bytes(&segment.id.object()).expect("there");
        for len in (0..bytes.len()).step_by(step) {
            assert_eq!(victim.segment_refusal(&library, segment, bytes[..len].to_vec()), "truncated");
        }
        for place in (0..8 * bytes.len()).step_by(step) {
            let (offset, bit) = (place / 8, place % 8);
            bytes[offset] ^= 1 << bit;
            let reason = victim.segment_refusal(&library, segment, bytes.clone());
            assert!(reasons(offset, 4096).contains(&reason), "byte {offset}, bit {bit}: {reason}");
            bytes[offset] ^= 1 << bit;
        }
    }
}

#[test]
fn flipped_bits_of_plain_objects_are_refused_too() {
    let (store, keys) = (MemoryStore::new(), keys());
    let options = LibraryOptions { encrypt: false, ..options() };
    let library = Library::open(Arc::new(store.clone()), keys.clone(), options).expect("open");
    let scope = library.scope(identity(), "");
    let units = prompt(256, 0, 0);
    publish(&library, &scope, &units).expect("published");
    let plan = library.longest(&scope, &units, 256, true).expect("found");
    restore(&library, &scope, &units, &plan).expect("restored");
    for segment in &plan.segments {
        let name = segment.id.object();
        let original = store.bytes(&name).expect("there");
        for offset in (0..original.len()).step_by(7) {
            let mut bytes = original.clone();
            bytes[offset] ^= 1 << (offset % 8);
            store.tamper(&name, bytes);
            let mut out = vec![0; segment.bytes];
            let refused =
                library.fetch(&scope, segment, &mut out).expect_err("a changed segment is restored");
            let reason = refused.refusal().expect("a refusal").name();
            assert!(reasons(offset, 4096).contains(&reason), "byte {offset}: {reason}");
        }
        store.tamper(&name, original);
    }
}

#[test]
fn authentic_objects_in_each_others_places_are_refused() {
    let victim = Victim::new();
    let library = victim.library();
    let groups = [(KvGroup::Full, 0), (KvGroup::Full, 1), (KvGroup::Sliding, 0), (KvGroup::Sliding, 1)];
    let segments = groups.map(|(group, index)| victim.segment(&library, group, index));
    for a in &segments {
        for b in &segments {
            if a.id != b.id {
                let bytes = victim.store.bytes(&b.id.object()).expect("there");
                assert_eq!(victim.segment_refusal(&library, a, bytes), "swapped");
            }
        }
        let manifest = victim.store.bytes(&victim.id.object()).expect("there");
        assert_eq!(victim.segment_refusal(&library, a, manifest), "swapped");
        let segment = victim.store.bytes(&a.id.object()).expect("there");
        assert_eq!(victim.manifest_refusal(segment), "swapped");
    }
    let scope = library.scope(identity(), "");
    let other = publish(&library, &scope, &prompt(400, 0, 6)).expect("published").id;
    let bytes = victim.store.bytes(&other.object()).expect("there");
    library.remove(other).expect("removed");
    assert_eq!(victim.manifest_refusal(bytes), "swapped");
}

#[test]
fn reordered_chunks_are_refused() {
    let victim = Victim::new();
    let library = victim.library();
    let segment = victim.segment(&library, KvGroup::Sliding, 0);
    let bytes = victim.store.bytes(&segment.id.object()).expect("there");
    let mut swapped = bytes.clone();
    swapped[4096..8192].copy_from_slice(&bytes[8192..12288]);
    swapped[8192..12288].copy_from_slice(&bytes[4096..8192]);
    assert_eq!(victim.segment_refusal(&library, &segment, swapped.clone()), "chunk");
    // With their tags, but without the key, the header tells.
    let (first, second) = (bytes[128..144].to_vec(), bytes[144..160].to_vec());
    swapped[128..144].copy_from_slice(&second);
    swapped[144..160].copy_from_slice(&first);
    assert_eq!(victim.segment_refusal(&library, &segment, swapped), "header");
}

#[test]
fn plain_objects_are_refused_by_a_store_that_encrypts() {
    let victim = Victim::new();
    let library = victim.library();
    let segment = victim.segment(&library, KvGroup::Full, 0);
    let scope = library.scope(identity(), "");
    let rows = crate::testing::rows(&scope, &victim.units, KvGroup::Full, 0);
    let spec = Spec { kind: Kind::Full, row_bytes: 16, positions: 256, chunk_bytes: 4096 };
    let sealed = seal(&victim.keys, false, spec, segment.id.0, &rows).expect("sealed");
    let plain = [sealed.header, sealed.body].concat();
    assert_eq!(victim.segment_refusal(&library, &segment, plain), "not_encrypted");
}

#[test]
fn a_manifest_that_is_put_back_is_replayed() {
    let victim = Victim::new();
    let name = victim.id.object();
    let old = victim.store.bytes(&name).expect("there");
    let library = victim.library();
    let scope = library.scope(identity(), "");
    let plan = library.longest(&scope, &victim.units, 300, false).expect("found");
    let segments: Vec<_> = plan.segments.iter().map(|segment| segment.id.object()).collect();
    let copies: Vec<_> = segments.iter().map(|name| victim.store.bytes(name).expect("there")).collect();
    drop(plan);
    library.remove(victim.id).expect("removed");
    // Everything comes back but the catalog's word.
    victim.store.tamper(&name, old.clone());
    for (name, bytes) in segments.iter().zip(copies) {
        victim.store.tamper(name, bytes);
    }
    let again = victim.library();
    assert!(again.longest(&scope, &victim.units, 300, false).is_none());
    assert_eq!(again.counters().snapshot().refused().collect::<Vec<_>>(), [("replayed", 1)]);
    assert_eq!(again.collect_garbage().expect("collected").0, 0, "opening swept it all away");
    // Put back under a running process it is not found by its name either.
    victim.store.tamper(&name, old.clone());
    let refused = again.plan_of(&scope, victim.id).expect_err("by name, too");
    assert_eq!(refused.counter_name(), "replayed");
    assert_eq!(again.collect_garbage().expect("collected").0, 1);
    // Published anew it has another salt: the old manifest is not the one that the catalog speaks of.
    let id = publish(&again, &scope, &victim.units).expect("published").id;
    assert_eq!(id, victim.id);
    assert_eq!(victim.manifest_refusal(old), "replayed");
    assert!(victim.library().longest(&scope, &victim.units, 300, false).is_some());
}

#[test]
fn a_refused_segment_is_not_found_until_it_is_published_again() {
    let victim = Victim::new();
    let library = victim.library();
    let scope = library.scope(identity(), "");
    let segment = victim.segment(&library, KvGroup::Full, 0);
    let mut bytes = victim.store.bytes(&segment.id.object()).expect("there");
    bytes[5000] ^= 1;
    victim.store.tamper(&segment.id.object(), bytes);
    let mut out = vec![0; segment.bytes];
    library.fetch(&scope, &segment, &mut out).expect_err("changed");
    assert!(library.longest(&scope, &victim.units, 300, false).is_none());
    assert!(victim.library().longest(&scope, &victim.units, 300, false).is_none(), "after a restart, too");
    assert_eq!(
        victim.library().counters().snapshot().refused().collect::<Vec<_>>(),
        [("missing_segment", 1)]
    );
    let published = publish(&library, &scope, &victim.units).expect("published");
    assert!(published.existed);
    for library in [&library, &victim.library()] {
        let plan = library.longest(&scope, &victim.units, 300, false).expect("found again");
        restore(library, &scope, &victim.units, &plan).expect("restored");
    }
}

#[test]
fn an_equal_name_with_another_content_is_put_aside() {
    let (store, keys) = (MemoryStore::new(), keys());
    let library = library(&store, &keys);
    let scope = library.scope(identity(), "");
    let units = prompt(256, 0, 0);
    let id = publish(&library, &scope, &units).expect("published").id;
    let plan = library.longest(&scope, &units, 256, true).expect("found");
    let segment = plan.segments[0].id.object();
    drop(plan);
    library.remove(id).expect("removed");
    // Somebody wrote files with the names that will be used next.
    store.tamper(&segment, b"not it".to_vec());
    store.tamper(&id.object(), vec![0; 5000]);
    publish(&library, &scope, &units).expect("published");
    let conflicts: Vec<_> = library.counters().snapshot().refused().collect();
    assert!(conflicts.contains(&("conflict", 2)), "{conflicts:?}");
    let plan = library.longest(&scope, &units, 256, true).expect("found");
    restore(&library, &scope, &units, &plan).expect("restored");
}

/// Payloads that only a writer with the key could make: decoding is strict all the same.
#[test]
fn malformed_manifests_are_refused_even_when_they_are_authentic() {
    let victim = Victim::new();
    let library = victim.library();
    let (manifest, _) = library.shared.read_manifest(victim.id, None).expect("good");
    let good = manifest.encode();
    assert_eq!(Manifest::decode(&good).as_ref(), Ok(&manifest));
    for len in 0..good.len() {
        assert!(Manifest::decode(&good[..len]).is_err(), "{len} bytes decode");
    }
    assert!(Manifest::decode(&[&good[..], &[0]].concat()).is_err());
    for offset in 0..good.len() {
        for value in [good[offset] ^ 1, good[offset] ^ 0x80, 0xff, good[offset].wrapping_add(1)] {
            let mut bytes = good.clone();
            bytes[offset] = value;
            // What decodes must be exactly what it encodes to: there is one encoding of everything.
            if let Ok(decoded) = Manifest::decode(&bytes) {
                assert!(decoded.encode() == bytes, "byte {offset} = {value} has two encodings");
            }
        }
    }
    let authentic = |payload: &[u8]| {
        let spec = Spec::plain(Kind::Manifest);
        let sealed = seal(&victim.keys, true, spec, victim.id.0, payload).expect("sealed");
        [sealed.header, sealed.body].concat()
    };
    // The catalog does not speak of it.
    assert_eq!(victim.manifest_refusal(authentic(&good)), "replayed");
    let object = ObjectName { area: Area::Packs, id: victim.id.0 };
    for (payload, expected) in
        [(&good[..good.len() - 1], "truncated"), (&[&good[..], &[0]].concat(), "trailing")]
    {
        victim.store.tamper(&object, authentic(payload));
        let refused = library.shared.read_manifest(victim.id, None).expect_err("malformed");
        assert_eq!(refused.counter_name(), expected);
    }
}

#[test]
fn limits_hold_at_the_limit_and_not_beyond() {
    let keys = keys();
    let object = |chunk_bytes: u32, len: usize| {
        let spec = Spec { kind: Kind::Full, row_bytes: 16, positions: 256, chunk_bytes };
        seal(&keys, true, spec, [0; 32], &vec![0; len]).map(drop).map_err(|error| error.counter_name())
    };
    assert_eq!(object(4 << 20, 9 << 20), Ok(()));
    assert_eq!(object((4 << 20) + 4096, 9 << 20), Err("over_limit"));
    assert_eq!(object(4095, 8192), Err("malformed"));
    assert_eq!(object(4096, 8191), Err("malformed"), "half a row");
    assert_eq!(object(4096, 0), Err("malformed"));
    let manifest = |len: usize| {
        let sealed = seal(&keys, true, Spec::plain(Kind::Manifest), [0; 32], &vec![0; len]);
        sealed.map(drop).map_err(|error| error.counter_name())
    };
    assert_eq!(manifest(64 << 20), Ok(()));
    assert_eq!(manifest((64 << 20) + 1), Err("over_limit"));
    // A row that pages do not divide makes chunks of both.
    assert_eq!(crate::object::chunk_bytes(272, 256 << 10), 3 * 69_632);
    assert_eq!(crate::object::chunk_bytes(512, 256 << 10), 256 << 10);
}

#[test]
fn a_record_that_was_removed_and_written_anew_does_not_come_back() {
    let (store, keys) = (MemoryStore::new(), keys());
    let library = library(&store, &keys);
    library.put_record("session", "a", b"the old one").expect("written");
    let name = store.list(Area::Records).expect("listed")[0].name;
    let old = store.bytes(&name).expect("there");
    library.remove_record("session", "a").expect("removed");
    let revision = library.put_record("session", "a", b"the new one").expect("written");
    // The same place in the store, the same revision, authentic bytes: only the catalog knows which of the two counts.
    let new = store.bytes(&name).expect("the same name");
    assert_eq!(library.record("session", "a").expect("read"), Some((b"the new one".to_vec(), revision)));
    store.tamper(&name, old);
    let refused = library.record("session", "a").expect_err("the old one is put back");
    assert_eq!(refused.counter_name(), "replayed");
    store.tamper(&name, new);
    assert_eq!(library.record("session", "a").expect("read"), Some((b"the new one".to_vec(), revision)));
}
