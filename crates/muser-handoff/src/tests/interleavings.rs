//! All orders of a transfer's messages and one crash: nothing is installed that was not sealed, nothing acknowledged that was
//! not installed, and whatever was cut off ends well with what had come.

use std::collections::VecDeque;
use std::time::Duration;

use muser_kv::KvGroup;

use super::{Memory, assert_complete, fetch_of, give, links, refusals, sends, series, take};
use crate::consumer::Event;
use crate::frame::{ChunkHead, Frame};
use crate::link::{Doing, Link};
use crate::producer::Wants;
use crate::{Ended, FetchEnd, Nonce, RangeSet, Reason, Series, TransferId};

/// Both sides and what is between them. Chunks travel on two streams of their own.
#[derive(Clone)]
struct World {
    consumer: Link,
    producer: Link,
    to_producer: VecDeque<Frame>,
    to_consumer: VecDeque<Frame>,
    chunks: [VecDeque<(ChunkHead, Vec<u8>)>; 2],
    memory: Memory,
    ready: Vec<u32>,
    installed: Vec<u32>,
    ended: Option<FetchEnd>,
    series: Option<Series>,
    given: Option<Ended>,
    sealed: bool,
    /// Chunks that the producer has not given, which it may do in any order: here from either end.
    left: VecDeque<u32>,
    sent_bytes: u64,
}

const TRANSFER: TransferId = TransferId(1);
const CUT: u32 = 300;

/// Of ten chunks three are held.
fn anew() -> Series {
    series(CUT, &[256], false, |group, block| (group, block) == (KvGroup::Sliding, 0))
}

impl World {
    fn new(series: Series) -> Self {
        let chunks = series.plan().chunks();
        let (mut consumer, producer) = links(false, true);
        let (_, request) =
            consumer.fetch(fetch_of(series), Nonce([1; 16]), Duration::ZERO).expect("a transfer");
        Self {
            consumer,
            producer,
            to_producer: [request].into(),
            to_consumer: VecDeque::new(),
            chunks: [VecDeque::new(), VecDeque::new()],
            memory: Memory::new(),
            ready: Vec::new(),
            installed: Vec::new(),
            ended: None,
            series: None,
            given: None,
            sealed: false,
            left: (0..chunks).collect(),
            sent_bytes: 0,
        }
    }

    fn consumer_did(&mut self, doing: Vec<Doing>) {
        assert_eq!(refusals(&doing), [""; 0], "nobody did anything wrong");
        for one in doing {
            match one {
                Doing::Send(frame) => {
                    if matches!(frame, Frame::Ack(_)) {
                        assert!(self.installed.contains(&CUT), "acknowledged before the switch");
                    }
                    self.to_producer.push_back(frame);
                }
                Doing::Tell(_, Event::Ready(boundary)) => {
                    let plan = self.consumer.consumer(TRANSFER).expect("it goes on").plan().clone();
                    let all_there = plan.needed_at(boundary).minus(&anew().own).iter().all(|number| {
                        let place = plan.place(number).expect("a chunk");
                        self.memory.contains_key(&(place.group, place.block, place.component, place.layer))
                    });
                    assert!(all_there, "ready before everything was there");
                    assert!(boundary != CUT || self.sealed, "ready before it was sealed");
                    assert!(!self.ready.contains(&boundary), "ready twice");
                    self.ready.push(boundary);
                }
                Doing::Over(_, series, end) => {
                    self.series = Some(*series);
                    assert!(self.ended.replace(end).is_none(), "ended twice");
                }
                _ => {}
            }
        }
    }

    fn producer_did(&mut self, doing: Vec<Doing>) {
        assert_eq!(refusals(&doing), [""; 0], "nobody did anything wrong");
        self.to_consumer.extend(sends(&doing));
        for one in doing {
            match one {
                Doing::Serve(transfer, ..) => {
                    let begun = self.producer.with_producer(transfer, |producer| {
                        producer.begin(&[256], Nonce([2; 16]), Duration::ZERO)
                    });
                    self.producer_did(begun);
                }
                Doing::Ended(_, ended) => assert!(self.given.replace(ended).is_none(), "ended twice"),
                _ => {}
            }
        }
    }

    fn choices(&self) -> Vec<Choice> {
        let mut all = Vec::new();
        let mut add = |possible: bool, choice| {
            if possible {
                all.push(choice);
            }
        };
        add(!self.to_producer.is_empty(), Choice::ToProducer);
        add(!self.to_consumer.is_empty(), Choice::ToConsumer);
        for stream in 0..2 {
            add(!self.chunks[stream].is_empty(), Choice::Chunk(stream));
        }
        let waits = self.ready.iter().find(|ready| !self.installed.contains(ready));
        if let Some(&boundary) = waits {
            add(true, Choice::Install(boundary));
        }
        let mut producer = self.producer.clone();
        let ends = [self.left.front(), self.left.back().filter(|_| self.left.len() > 1)];
        for (end, number) in ends.into_iter().enumerate() {
            let may = number.zip(producer.producer(TRANSFER)).is_some_and(|(&number, producer)| {
                producer.lacks(0..CUT) && producer.wants(number) != Wants::Wait
            });
            add(may, Choice::Give(end));
        }
        all
    }

    fn take_step(&mut self, choice: Choice) {
        let now = Duration::ZERO;
        match choice {
            Choice::ToProducer => {
                let frame = self.to_producer.pop_front().expect("there is one");
                if matches!(frame, Frame::Ack(_)) {
                    assert!(self.installed.contains(&CUT));
                }
                let doing = self.producer.frame(frame, now);
                self.producer_did(doing);
            }
            Choice::ToConsumer => {
                let frame = self.to_consumer.pop_front().expect("there is one");
                self.sealed |= matches!(frame, Frame::Seal(_));
                let doing = self.consumer.frame(frame, now);
                self.consumer_did(doing);
            }
            Choice::Chunk(stream) => {
                let (head, rows) = self.chunks[stream].pop_front().expect("there is one");
                let doing = take(&mut self.consumer, &mut self.memory, &head, &rows, now);
                self.consumer_did(doing);
            }
            Choice::Install(boundary) => {
                self.installed.push(boundary);
                let doing =
                    self.consumer.with_consumer(TRANSFER, |consumer| consumer.installed(boundary, now));
                self.consumer_did(doing);
            }
            Choice::Give(end) => {
                let number = if end == 0 { self.left.pop_front() } else { self.left.pop_back() };
                let (chunk, doing) = give(&mut self.producer, TRANSFER, number.expect("there is one"));
                if let Some((head, rows)) = chunk {
                    self.sent_bytes += rows.len() as u64;
                    self.chunks[end].push_back((head, rows));
                }
                self.producer_did(doing);
            }
        }
    }

    fn run_to_the_end(&mut self) {
        while let Some(&choice) = self.choices().first() {
            self.take_step(choice);
        }
    }

    fn check_end(&self, was_there: &RangeSet, series: &Series) {
        let plan = series.plan();
        assert_eq!(self.ended, Some(FetchEnd::Installed));
        assert_eq!(self.given, Some(Ended::Acknowledged));
        assert!(self.installed.contains(&CUT));
        let all = RangeSet::from(0..plan.chunks());
        let all = all.minus(&series.own);
        assert_complete(&self.memory, plan, &all);
        assert_eq!(self.sent_bytes, plan.bytes_of(&all.minus(was_there)), "nothing is sent twice");
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    ToProducer,
    ToConsumer,
    Chunk(usize),
    Give(usize),
    Install(u32),
}

/// The connection breaks (because either end crashed, or by itself).
fn crash(world: &World, consumer_lives: bool) {
    let mut world = world.clone();
    let given_before = world.given;
    let doing = world.producer.close(Reason::Silent, None);
    world.producer_did(doing);
    let request_arrived = world.producer.producer(TRANSFER).is_some() || world.given.is_some();
    assert!(!request_arrived || world.given.is_some(), "the producer goes on for nobody");
    assert!(given_before.is_none() || world.given == given_before);
    // What was on its way is gone. A consumer that lives goes on with what it has, one that crashed begins anew.
    let (again, memory) = if consumer_lives {
        if world.ended.is_none() {
            let doing = world.consumer.close(Reason::Silent, None);
            world.consumer_did(doing);
            assert_eq!(world.ended, Some(FetchEnd::Lost));
        }
        (world.series.expect("it is over"), world.memory)
    } else {
        (anew(), Memory::new())
    };
    if world.ended == Some(FetchEnd::Installed) && consumer_lives {
        return;
    }
    let received = again.received().clone();
    let mut next = World::new(again.clone());
    next.memory = memory;
    next.run_to_the_end();
    next.check_end(&received, &again);
}

/// Depth first. States that differ in nothing but the way there are walked once.
fn explore(world: &World, seen: &mut std::collections::HashSet<String>, counted: &mut (u64, u64)) {
    let key = format!(
        "{:?}{:?}{:?}{:?}{:?}{:?}{:?}",
        world.to_producer.len(),
        world.to_consumer.iter().map(Frame::kind).collect::<Vec<_>>(),
        world.chunks.each_ref().map(VecDeque::len),
        world.memory.keys().collect::<Vec<_>>(),
        (&world.ready, &world.installed, &world.left, world.sealed),
        world.to_producer.iter().map(Frame::kind).collect::<Vec<_>>(),
        (&world.ended, world.given),
    );
    if !seen.insert(key) {
        return;
    }
    counted.0 += 1;
    for consumer_lives in [true, false] {
        crash(world, consumer_lives);
        counted.1 += 1;
    }
    let choices = world.choices();
    if choices.is_empty() {
        world.check_end(&RangeSet::default(), &anew());
    }
    for choice in choices {
        let mut next = world.clone();
        next.take_step(choice);
        explore(&next, seen, counted);
    }
}

#[test]
fn every_order_and_a_crash_anywhere_end_well() {
    // REQUEST, BEGIN, the consumer's PROGRESS, STAGE, SEAL and ACK, and chunks on two streams; a switch is a step, too.
    let world = World::new(anew());
    let mut counted = (0, 0);
    explore(&world, &mut std::collections::HashSet::new(), &mut counted);
    assert!(counted.0 > 1000, "{counted:?}");
}
