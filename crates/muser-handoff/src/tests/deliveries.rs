//! Chunks in any order over several streams, and what a broken or hostile producer could do to them.

use std::sync::Arc;
use std::time::Duration;

use muser_kv::KvGroup;
use proptest::prelude::*;

use super::{Memory, assert_complete, fetch_of, give, links, refusals, sends, series, take};
use crate::consumer::{Consumer, Event};
use crate::frame::{Begin, ChunkHead, Frame, Progress};
use crate::link::{Doing, Link};
use crate::producer::Wants;
use crate::{FetchEnd, Nonce, Plan, RangeSet, Series, TransferId};

/// All that a producer says in one transfer.
struct Said {
    begin: Frame,
    chunks: Vec<(ChunkHead, Vec<u8>)>,
    /// STAGEs, then SEAL.
    ends: Vec<Frame>,
}

struct Bench {
    consumer: Link,
    plan: Arc<Plan>,
    transfer: TransferId,
    said: Said,
    own: RangeSet,
    memory: Memory,
    ready: Vec<u32>,
    ended: Option<FetchEnd>,
    series: Option<Series>,
    refused: Vec<&'static str>,
}

/// A transfer of which the producer's side has run to its end.
fn bench(series: Series, nonce: u8, producer_draft: bool) -> Bench {
    let now = Duration::ZERO;
    let (plan, own) = (Arc::clone(series.plan()), series.own.clone());
    let (mut consumer, mut producer) = links(plan.planes().has_draft(), producer_draft);
    let (transfer, request) = consumer.fetch(fetch_of(series), Nonce([nonce; 16]), now).expect("a transfer");
    producer.frame(request, now);
    let stages = plan.span().stages.clone();
    let begun =
        producer.with_producer(transfer, |producer| producer.begin(&stages, Nonce([nonce + 1; 16]), now));
    let mut frames = sends(&begun);
    let mut said = Said { begin: frames.remove(0), chunks: Vec::new(), ends: frames };
    // The credit of a consumer that takes what comes at once.
    for credit in consumer.frame(said.begin.clone(), now) {
        if let Doing::Send(frame) = credit {
            producer.frame(frame, now);
        }
    }
    for number in 0..plan.chunks() {
        let (chunk, doing) = give(&mut producer, transfer, number);
        said.chunks.extend(chunk);
        said.ends.extend(sends(&doing));
    }
    let (memory, ready, refused) = (Memory::new(), Vec::new(), Vec::new());
    Bench { consumer, plan, transfer, said, own, memory, ready, ended: None, series: None, refused }
}

impl Bench {
    fn did(&mut self, doing: &[Doing]) {
        self.refused.extend(refusals(doing));
        for one in doing {
            match one {
                Doing::Tell(_, Event::Ready(boundary)) => {
                    self.ready.push(*boundary);
                    let (transfer, boundary) = (self.transfer, *boundary);
                    let doing = self
                        .consumer
                        .with_consumer(transfer, |consumer| consumer.installed(boundary, Duration::ZERO));
                    self.did(&doing);
                }
                Doing::Over(_, series, end) => {
                    (self.series, self.ended) = (Some(Series::clone(series)), Some(end.clone()));
                }
                _ => {}
            }
        }
    }

    fn chunk(&mut self, head: &ChunkHead, rows: &[u8]) {
        let doing = take(&mut self.consumer, &mut self.memory, head, rows, Duration::ZERO);
        self.did(&doing);
    }

    fn frame(&mut self, frame: Frame) {
        let doing = self.consumer.frame(frame, Duration::ZERO);
        self.did(&doing);
    }

    /// Long after SEAL.
    fn wait(&mut self) {
        let later = Duration::from_secs(4);
        let sign = Frame::Progress(Progress::Producer { transfer: self.transfer, rows: 1, rest_ms: None });
        let mut doing = self.consumer.frame(sign, later);
        doing.extend(self.consumer.tick(later));
        self.did(&doing);
    }

    fn deliver_all(&mut self) {
        for (head, rows) in std::mem::take(&mut self.said.chunks) {
            self.chunk(&head, &rows);
        }
        for frame in std::mem::take(&mut self.said.ends) {
            self.frame(frame);
        }
        self.wait();
    }
}

/// What a bad producer does.
const FAULTS: [(&str, &str); 20] = [
    ("a byte changed", "chunk_digest"),
    ("a digest changed", "chunk_digest"),
    ("dropped", "missing"),
    ("doubled", "again"),
    ("rows of two swapped", "chunk_digest"),
    ("places of two swapped", "chunk_digest"),
    ("rows that overlap", "rows"),
    ("a layer that is not there", "place"),
    ("a block that is not there", "place"),
    ("too short", "payload"),
    ("too long", "payload"),
    ("a chunk of another series", "chunk_digest"),
    ("another root", "seal_root"),
    ("another stage root", "stage_root"),
    ("another count", "seal_totals"),
    ("another sum", "seal_totals"),
    ("another code", "seal_code"),
    ("sealed twice", "after_seal"),
    ("a stage that was not asked for", "stage"),
    ("BEGIN twice", "order"),
];

fn spoil(bench: &mut Bench, fault: usize, at: usize) {
    let count = bench.said.chunks.len();
    let at = at % count;
    let other = (at + 1) % count;
    let rows = bench.said.chunks[at].1.len();
    match fault {
        0 => bench.said.chunks[at].1[rows / 2] ^= 1,
        1 => bench.said.chunks[at].0.digest[3] ^= 8,
        2 => drop(bench.said.chunks.remove(at)),
        3 => {
            let chunk = bench.said.chunks[at].clone();
            bench.said.chunks.push(chunk);
        }
        4 => {
            // Of equally many rows.
            let same = |chunk: &(ChunkHead, Vec<u8>)| chunk.1.len() == rows;
            let other =
                (0..count).find(|&i| i != at && same(&bench.said.chunks[i])).expect("layers are alike");
            let mine = std::mem::take(&mut bench.said.chunks[at].1);
            bench.said.chunks[at].1 = std::mem::replace(&mut bench.said.chunks[other].1, mine);
        }
        5 => {
            let (a, b) = (bench.said.chunks[at].0.place, bench.said.chunks[other].0.place);
            let same = bench.plan.payload_bytes(&a) == bench.plan.payload_bytes(&b);
            bench.said.chunks[at].0.place = if same { b } else { bench.said.chunks[at].0.place };
            if same {
                bench.said.chunks[other].0.place = a;
            } else {
                bench.said.chunks[at].1[0] ^= 1;
            }
        }
        6 => {
            bench.said.chunks[at].0.place.first_row = 1;
        }
        7 => bench.said.chunks[at].0.place.layer = 77,
        8 => bench.said.chunks[at].0.place.block = 1 << 20,
        9 => drop(bench.said.chunks[at].1.pop()),
        10 => bench.said.chunks[at].1.push(0),
        11 => {
            let place = bench.said.chunks[at].0.place;
            let key = crate::SeriesKey::new(Nonce([99; 16]), &super::IDENTITY, &[0; 32]);
            bench.said.chunks[at].0.digest = key.chunk(&place, &bench.said.chunks[at].1);
        }
        12..=17 => {
            let again = bench.said.ends.last().cloned();
            for frame in &mut bench.said.ends {
                match (fault, frame) {
                    (12, Frame::Seal(seal)) => {
                        // With a right code, so that it is the root that is compared.
                        seal.root[0] ^= 1;
                        let Frame::Begin(_) = &bench.said.begin else { panic!("BEGIN") };
                        let key = bench.consumer.consumer(bench.transfer).expect("it goes on").key();
                        seal.code =
                            key.seal(&bench.said.begin.encode(0), &seal.root, seal.chunks, seal.bytes);
                    }
                    (13, Frame::Stage(stage)) => stage.root[31] ^= 1,
                    (14, Frame::Seal(seal)) => seal.chunks += 1,
                    (15, Frame::Seal(seal)) => seal.bytes -= 1,
                    (16, Frame::Seal(seal)) => seal.code[9] ^= 1,
                    _ => {}
                }
            }
            if fault == 17 {
                // While a chunk lacks, or it would be for a transfer that is over.
                bench.said.ends.extend(again);
                let last = bench.said.chunks.pop().expect("one");
                bench.said.chunks.clear();
                bench.said.chunks.push(last);
            }
        }
        18 => {
            let mut end = bench.said.ends.clone();
            for frame in &mut end {
                if let Frame::Stage(stage) = frame {
                    stage.boundary += 64;
                }
            }
            bench.said.ends = end;
        }
        _ => bench.said.ends.insert(0, bench.said.begin.clone()),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn order_alone_is_no_fault(
        cut in 1_u32..1500,
        stages in prop::collection::vec(any::<bool>(), 5),
        held in prop::collection::vec(any::<bool>(), 6),
        draft in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let stages: Vec<u32> = (1..=5).filter(|&i| stages[i as usize - 1] && i * 256 < cut).map(|i| i * 256).collect();
        let has = |group, block: u32| group == KvGroup::Full && held[block as usize];
        let mut bench = bench(series(cut, &stages, draft, has), 20, true);
        enum Any { Chunk(ChunkHead, Vec<u8>), Frame(Frame) }
        let mut all: Vec<Any> = bench.said.chunks.drain(..).map(|(head, rows)| Any::Chunk(head, rows)).collect();
        let sealed = bench.said.ends.pop().expect("SEAL");
        prop_assert!(matches!(sealed, Frame::Seal(_)));
        all.extend(bench.said.ends.drain(..).map(Any::Frame));
        let mut rng = muser_testkit::Rng(seed);
        for i in (1..all.len()).rev() {
            all.swap(i, rng.below(i + 1));
        }
        // What travels on one stream keeps its order: SEAL comes behind the last STAGE, and before or behind any chunk.
        let last_stage = all.iter().rposition(|one| matches!(one, Any::Frame(_))).map_or(0, |at| at + 1);
        let at = last_stage + rng.below(all.len() - last_stage + 1);
        all.insert(at, Any::Frame(sealed));
        let sent: RangeSet = all
            .iter()
            .filter_map(|one| if let Any::Chunk(head, _) = one { bench.plan.number(&head.place).ok() } else { None })
            .map(|number| number..number + 1)
            .collect();
        for one in all {
            match one {
                Any::Chunk(head, rows) => bench.chunk(&head, &rows),
                Any::Frame(frame) => bench.frame(frame),
            }
        }
        prop_assert_eq!(&bench.refused, &Vec::<&str>::new());
        prop_assert_eq!(bench.ended, Some(FetchEnd::Installed));
        let mut ready = bench.ready.clone();
        ready.sort_unstable();
        prop_assert_eq!(ready, stages.into_iter().chain([cut]).collect::<Vec<_>>());
        let lacking = RangeSet::from(0..bench.plan.chunks());
        prop_assert_eq!(&sent, &lacking.minus(&bench.own));
        assert_complete(&bench.memory, &bench.plan, &sent);
    }

    #[test]
    fn whatever_is_wrong_is_refused_by_name(fault in 0..FAULTS.len(), at in any::<u16>(), cut in 520_u32..900) {
        let mut bench = bench(series(cut, &[256, 512], false, |_, _| false), 30, false);
        spoil(&mut bench, fault, usize::from(at));
        bench.deliver_all();
        let (what, name) = FAULTS[fault];
        prop_assert_eq!(&bench.refused, &vec![name], "{}", what);
        prop_assert!(!bench.ready.contains(&cut), "installed although {what}");
        prop_assert!(matches!(bench.ended, Some(FetchEnd::Refused(_))), "{what}: {:?}", bench.ended);
    }
}

#[test]
fn every_fault_is_tried() {
    for (fault, (what, name)) in FAULTS.iter().enumerate() {
        for at in [0, 5, 11] {
            let mut bench = bench(series(777, &[256, 512], false, |_, _| false), 30, false);
            spoil(&mut bench, fault, at);
            bench.deliver_all();
            assert_eq!(bench.refused, [*name], "{what} at {at}");
            assert!(!bench.ready.contains(&777), "{what}");
        }
    }
}

#[test]
fn what_is_held_is_not_sent_and_refused_if_it_is() {
    let has = |group, block| group == KvGroup::Full && block < 2;
    let bench_with = || bench(series(700, &[], false, has), 40, false);
    let mut all = bench(series(700, &[], false, |_, _| false), 40, false);
    let (head, rows) = all.said.chunks.remove(0);
    let mut delta = bench_with();
    assert!(!delta.said.chunks.iter().any(|(sent, _)| sent.place == head.place));
    delta.chunk(&head, &rows);
    assert_eq!(delta.refused, ["held"]);
    let mut delta = bench_with();
    delta.deliver_all();
    assert_eq!((delta.ended, delta.refused.len()), (Some(FetchEnd::Installed), 0));
}

#[test]
fn a_chunk_that_is_being_written_is_not_admitted_again() {
    let mut bench = bench(series(700, &[], false, |_, _| false), 40, false);
    let (head, rows) = bench.said.chunks.remove(0);
    assert!(matches!(bench.consumer.admit(&head, rows.len(), Duration::ZERO), Ok(Some(_))));
    let again = bench.consumer.admit(&head, rows.len(), Duration::ZERO).expect_err("it is under way");
    assert_eq!(refusals(&again), ["again"]);
}

#[test]
fn credit_is_used_to_its_last_byte_and_comes_back_where_nothing_was_sent() {
    let now = Duration::ZERO;
    let (mut consumer, mut producer) = links(false, false);
    let wanted = series(700, &[], false, |_, _| false);
    let plan = Arc::clone(wanted.plan());
    let (transfer, request) = consumer.fetch(fetch_of(wanted), Nonce([9; 16]), now).expect("a transfer");
    producer.frame(request, now);
    producer.with_producer(transfer, |producer| producer.begin(&[], Nonce([10; 16]), now));
    let credit = plan.payload_bytes(&plan.place(0).expect("a chunk")) as u64;
    producer.frame(Frame::Progress(Progress::Consumer { transfer, credit, verified: 0, installed: 0 }), now);
    let producer = producer.producer(transfer).expect("it goes on");
    assert_eq!((producer.wants(0), producer.wants(1)), (Wants::Rows, Wants::Wait));
    producer.unpromise(0);
    assert_eq!((producer.wants(1), producer.wants(0)), (Wants::Rows, Wants::Wait));
}

#[test]
fn nothing_is_installed_that_was_not_ready() {
    let mut bench = bench(series(700, &[256], false, |_, _| false), 40, false);
    for boundary in [256, 512, 700] {
        let install = |consumer: &mut Consumer| consumer.installed(boundary, Duration::ZERO);
        assert_eq!(bench.consumer.with_consumer(bench.transfer, install).len(), 0, "{boundary}");
    }
    bench.deliver_all();
    assert_eq!((bench.ready, bench.ended), (vec![256, 700], Some(FetchEnd::Installed)));
}

#[test]
fn a_recorded_transfer_is_refused_wherever_it_is_played_again() {
    let wanted = || series(600, &[], false, |_, _| false);
    let recorded = bench(wanted(), 50, false).said;
    let (begin, seal) = (recorded.begin.clone(), recorded.ends.last().cloned().expect("SEAL"));
    // To the same consumer, once it has taken it.
    let mut same = bench(wanted(), 50, false);
    same.deliver_all();
    assert_eq!(same.ended, Some(FetchEnd::Installed));
    for frame in [begin.clone(), seal] {
        let mut again = same.consumer.clone();
        assert_eq!(refusals(&again.frame(frame, Duration::ZERO)), ["unsolicited"]);
        assert!(again.is_closed());
    }
    let (head, rows) = &recorded.chunks[0];
    let refused = same.consumer.admit(head, rows.len(), Duration::ZERO).expect_err("refused");
    assert_eq!(refusals(&refused), ["unsolicited"]);
    // To one that was restarted, or another one, that has asked for nothing.
    let (mut fresh, _) = links(false, false);
    assert_eq!(refusals(&fresh.frame(begin.clone(), Duration::ZERO)), ["unsolicited"]);
    // To one that has asked for the same with a number that is used again.
    let (mut asks, _) = links(false, false);
    asks.fetch(fetch_of(wanted()), Nonce([77; 16]), Duration::ZERO).expect("a transfer");
    assert_eq!(refusals(&asks.frame(begin, Duration::ZERO)), ["nonce"]);
    // Chunks of it in a transfer of another series.
    let mut other = wanted();
    other.nonce = Nonce([78; 16]);
    other.key = crate::SeriesKey::new(other.nonce, &super::IDENTITY, &other.prefix);
    let mut other = bench(other, 51, false);
    let (head, rows) = &recorded.chunks[0];
    other.chunk(&ChunkHead { transfer: other.transfer, ..*head }, rows);
    assert_eq!(other.refused, ["chunk_digest"]);
}

#[test]
fn altering_only_the_cut_or_what_is_held_is_found() {
    let has = |group, block| group == KvGroup::Full && block == 0;
    for change in [
        |begin: &mut Begin| begin.cut -= 1,
        |begin: &mut Begin| begin.holdings[0] ^= 1,
        |begin: &mut Begin| begin.producer_nonce.0[0] ^= 1,
    ] {
        // As if both ends had agreed on the changed BEGIN: SEAL binds what the producer sent.
        let mut bench = bench(series(700, &[], false, has), 60, false);
        let Frame::Begin(begin) = &mut bench.said.begin else { panic!("BEGIN") };
        change(begin);
        let changed = bench.said.begin.encode(0);
        let Some(Frame::Seal(seal)) = bench.said.ends.last() else { panic!("SEAL") };
        let key = bench.consumer.consumer(bench.transfer).expect("it goes on").key();
        assert_ne!(key.seal(&changed, &seal.root, seal.chunks, seal.bytes), seal.code);
    }
}

#[test]
fn a_series_goes_on_at_another_node_and_the_last_root_covers_everything() {
    let mut first = bench(series(900, &[512], true, |_, _| false), 70, true);
    let half = first.said.chunks.len() / 2;
    for (head, rows) in first.said.chunks.drain(..half).collect::<Vec<_>>() {
        first.chunk(&head, &rows);
    }
    let doing = first.consumer.close(crate::Reason::Silent, None);
    first.did(&doing);
    assert_eq!(first.ended, Some(FetchEnd::Lost));
    let series = first.series.take().expect("it is over");
    assert_eq!(series.received().len(), half as u64);
    let plan = Arc::clone(series.plan());
    // The second node disagrees about a chunk that the first one gave.
    let mut disagrees = series.clone();
    disagrees.digests[2][0] ^= 1;
    let mut second = bench(disagrees, 80, true);
    second.deliver_all();
    assert!(matches!(second.refused[..], ["stage_root" | "seal_root"]), "{:?}", second.refused);
    let mut second = bench(series, 80, true);
    assert_eq!(second.said.chunks.len() as u64, u64::from(plan.chunks()) - half as u64, "nothing twice");
    second.memory = std::mem::take(&mut first.memory);
    second.deliver_all();
    assert_eq!((second.ended, &second.refused), (Some(FetchEnd::Installed), &Vec::new()));
    let all = RangeSet::from(0..plan.chunks());
    assert_complete(&second.memory, &plan, &all);
}

#[test]
fn silence_lateness_and_cancelling_end_it_on_both_sides() {
    let now = Duration::ZERO;
    for (what, end) in
        [("silent", FetchEnd::Silent), ("late", FetchEnd::Late), ("cancelled", FetchEnd::Cancelled)]
    {
        let (mut consumer, mut producer) = links(false, false);
        let mut fetch = fetch_of(series(600, &[], false, |_, _| false));
        if what == "late" {
            fetch.budget = Duration::from_millis(300);
        }
        let (transfer, request) = consumer.fetch(fetch, Nonce([1; 16]), now).expect("a transfer");
        producer.frame(request, now);
        let begun = producer.with_producer(transfer, |producer| producer.begin(&[], Nonce([2; 16]), now));
        consumer.frame(sends(&begun).remove(0), now);
        let doing = match what {
            "cancelled" => consumer.with_consumer(transfer, Consumer::cancel),
            "late" => consumer.tick(Duration::from_millis(300)),
            _ => {
                assert!(sends(&consumer.tick(Duration::from_millis(1400))).len() == 1, "a sign of life");
                consumer.tick(Duration::from_millis(1600))
            }
        };
        let ended = doing.iter().any(|one| matches!(one, Doing::Over(_, _, found) if *found == end));
        assert!(ended, "{what}: {doing:?}");
        let abort = sends(&doing)
            .into_iter()
            .find(|frame| matches!(frame, Frame::Abort(_)))
            .expect("the peer is told");
        let told = producer.frame(abort, now);
        assert!(told.iter().any(|one| matches!(one, Doing::Ended(..))), "{what}: {told:?}");
        assert_eq!(producer.transfers(), (0, 0));
        // What was on its way is dropped and no fault.
        assert_eq!(consumer.transfers(), (0, 0));
        if what == "cancelled" {
            assert!(consumer.frame(sends(&begun).remove(0), now).is_empty());
        }
    }
}

#[test]
fn a_producer_whose_consumer_is_gone_stops_after_ten_seconds() {
    let now = Duration::ZERO;
    let (mut consumer, mut producer) = links(false, false);
    let (transfer, request) = consumer
        .fetch(fetch_of(series(600, &[], false, |_, _| false)), Nonce([1; 16]), now)
        .expect("a transfer");
    producer.frame(request, now);
    producer.with_producer(transfer, |producer| producer.begin(&[], Nonce([2; 16]), now));
    let at = |ms| Duration::from_millis(ms);
    let signs = sends(&producer.tick(at(600)));
    assert!(matches!(signs[..], [Frame::Progress(_)]), "a sign of life: {signs:?}");
    assert!(producer.tick(at(9_900)).iter().all(|one| !matches!(one, Doing::Ended(..))));
    let doing = producer.tick(at(10_100));
    assert!(doing.iter().any(|one| matches!(one, Doing::Ended(_, crate::Ended::Lost))), "{doing:?}");
}
