//! The consumer's thread: whom to ask, whom to choose, and what to do when something goes wrong.
//!
//! It hears of everything in one queue and never waits for anybody. Rows themselves do not come by here: the transport's
//! threads write them into the engine's memory ([`Landing`]).

use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use muser_engine::{BlockReceiver, PrefixQuery, RestoreFailure};
use muser_handoff::{
    Component, Facts, Fetch, FetchEnd, Fit, MAX_STAGES, Nonce, PeerState, Peers, Quote, Quoted, Reason,
    Series, Span, Wanted,
};
use muser_kv::{BLOCK_LEN, KvGroup};

use crate::audit::ONE_IN;
use crate::choose::soonest;
use crate::circuit::Circuit;
use crate::figures::Counters;
use crate::job::{Job, JobSink, Kept, Request, Retry};
use crate::landing::{Block, Landing};
use crate::nodes::{Audit, AuditFrom, NodeUse};
use crate::options::{NodeOptions, Preference};
use crate::quotes::{Bytes, Question, block_hashes, offer};
use crate::told::{HandedPrefix, JobId, Numbers, Told};

/// A stage's window must fit through the link beside the rows, with room to spare.
const ROOM: f64 = 1.75;
/// Positions of a prompt that is long, whatever the machine.
const LONG: usize = 1024;
/// Computing here must be sooner by this to change over in the middle.
const CLEARLY: f64 = 1.25;
/// How long a lost connection may take to come back where no other node is left, and how often that is looked at.
const RECONNECT: Duration = Duration::from_millis(80);
const LOOK: Duration = Duration::from_millis(10);

static NUMBERS: Numbers = Numbers::new();

pub(crate) struct Consumer {
    peers: Arc<dyn Peers>,
    facts: Facts,
    bytes: Bytes,
    options: NodeOptions,
    nodes: NodeUse,
    counters: Arc<Counters>,
    /// Hand-offs that each node has brought to their end.
    installed: HashMap<Arc<str>, u64>,
    tell: Sender<Told>,
    questions: HashMap<u32, Question>,
    jobs: HashMap<JobId, Job>,
    circuits: HashMap<Arc<str>, Circuit>,
    next_question: u32,
}

impl Consumer {
    pub(crate) fn new(
        peers: Arc<dyn Peers>,
        facts: Facts,
        options: NodeOptions,
        nodes: NodeUse,
        tell: Sender<Told>,
    ) -> Self {
        let row = |group| {
            let planes = facts.planes.of_group(group).filter(|plane| plane.component == Component::Target);
            planes.map(|plane| usize::from(plane.layers) * plane.row_bytes()).sum()
        };
        let bytes = Bytes {
            full_row: row(KvGroup::Full),
            sliding_row: row(KvGroup::Sliding),
            window: facts.window as usize,
        };
        Self {
            peers,
            facts,
            bytes,
            options,
            counters: Arc::clone(&nodes.counters),
            nodes,
            installed: HashMap::new(),
            tell,
            questions: HashMap::new(),
            jobs: HashMap::new(),
            circuits: HashMap::new(),
            next_question: 1,
        }
    }

    /// Takes a message in.
    pub(crate) fn take(&mut self, told: Told, now: Instant) {
        match told {
            Told::Asked(query) => self.ask(query, now),
            Told::Quoted { question, node, quoted } => {
                let Some(asked) = self.questions.get_mut(&question) else { return };
                asked.waiting.retain(|other| *other != node);
                asked.answers.extend(quoted.map(|quoted| (node, quoted)));
                if asked.waiting.is_empty() {
                    self.decide(question, now);
                }
            }
            Told::Fetch { job, wanted, delivery } => self.begin_stage(job, wanted, delivery),
            Told::StageEnded { job, stage, imported } => self.end_stage(job, stage, imported),
            Told::Forgotten { job } => {
                if self.jobs.get(&job).is_some_and(|job| job.delivery.is_none() && job.known < job.cut()) {
                    self.drop_job(job);
                }
            }
            Told::Begun { job, turn, stages } => self.note_begun(job, turn, &stages),
            Told::Ready { job: id, turn, boundary } => {
                let Some(job) = self.jobs.get_mut(&id).filter(|job| job.is_current(turn)) else { return };
                job.ready = job.ready.max(boundary);
                self.deliver(id);
            }
            Told::Rest { job, turn, rest } => self.compare_with_here(job, turn, rest),
            Told::Ended { job, turn, series, end } => self.end_request(job, turn, series, &end, now),
            Told::Close => {}
        }
    }

    /// Does what is due; answers when something will be.
    pub(crate) fn work(&mut self, now: Instant) -> Option<Instant> {
        let due = |until: &Instant| now >= *until;
        let late: Vec<u32> =
            self.questions.iter().filter(|(_, asked)| due(&asked.until)).map(|(id, _)| *id).collect();
        late.into_iter().for_each(|question| self.decide(question, now));
        let over: Vec<JobId> =
            self.jobs.iter().filter(|(_, job)| due(&job.until)).map(|(id, _)| *id).collect();
        over.into_iter().for_each(|id| self.give_up(id, RestoreFailure::Slow));
        let lost = self.jobs.iter().filter(|(_, job)| job.retry.as_ref().is_some_and(|retry| due(&retry.at)));
        let lost: Vec<JobId> = lost.map(|(id, _)| *id).collect();
        lost.into_iter().for_each(|id| self.look_again(id, now));
        let retries = self.jobs.values().filter_map(|job| job.retry.as_ref().map(|retry| retry.at));
        let jobs = self.jobs.values().map(|job| job.until);
        self.questions.values().map(|asked| asked.until).chain(retries).chain(jobs).min()
    }

    /// Ends everything.
    pub(crate) fn close(&mut self) {
        self.questions.clear();
        let jobs: Vec<JobId> = self.jobs.keys().copied().collect();
        jobs.into_iter().for_each(|id| self.give_up(id, RestoreFailure::Store));
    }
}

/// Asking and choosing.
impl Consumer {
    fn ask(&mut self, query: PrefixQuery, now: Instant) {
        // Pictures are not sent; and what is computed for a peer is computed here, or it would go on for ever.
        let ids: Option<Arc<[u32]>> = query.units().iter().map(|unit| unit.as_token()).collect();
        let Some(ids) = ids.filter(|_| !query.is_for_peer() && query.is_wanted()) else { return };
        let local = local_time(&query);
        let lacking = ids.len().saturating_sub(query.known());
        let little = match local {
            Some(local) => local <= self.options.least_local,
            // Nothing was measured here yet: the way there and back is worth it for long prompts alone.
            None => lacking < LONG,
        };
        if (self.options.preference == Preference::Soonest && little) || lacking < BLOCK_LEN {
            return;
        }
        Counters::add(&self.counters.asked, 1);
        let nodes = self.nodes_for(ids.len(), now);
        if nodes.is_empty() {
            Counters::add(&self.counters.no_node, 1);
            return;
        }
        let question = self.next_question;
        self.next_question = self.next_question.wrapping_add(1);
        let tenant = self.peers.tenant(&query.scope());
        let quote = Quote {
            question,
            identity: self.facts.identity,
            positions: ids.len() as u32,
            held: query.known() as u32,
            hashes: block_hashes(&self.facts.identity, &tenant, &ids),
        };
        let waiting: Vec<Arc<str>> = nodes.iter().map(|peer| Arc::clone(&peer.peer.name)).collect();
        let until = now + self.options.ask_for;
        let asked = Question { query, ids, began: now, until, waiting: waiting.clone(), answers: Vec::new() };
        self.questions.insert(question, asked);
        for node in waiting {
            let mut answer = Quoting { question, node: Arc::clone(&node), tell: Some(self.tell.clone()) };
            self.peers.quote(&node, quote.clone(), Box::new(move |quoted| answer.say(Some(quoted))));
        }
    }

    /// Nodes that could read a prompt of so many positions, the least busy first.
    pub(crate) fn nodes_for(&self, positions: usize, now: Instant) -> Vec<PeerState> {
        let mut nodes: Vec<PeerState> =
            self.peers.list().into_iter().filter(|peer| self.could_read(peer, positions, now)).collect();
        nodes.sort_by_key(|peer| peer.load.as_ref().map_or(0, |(load, _)| load.queued_rows));
        nodes.truncate(self.options.most_nodes);
        nodes
    }

    fn could_read(&self, peer: &PeerState, positions: usize, now: Instant) -> bool {
        let name = &peer.peer.name;
        let Some(hello) = peer.hello.as_ref().filter(|_| peer.connected) else { return false };
        let named = self.options.only.as_ref().is_none_or(|only| only.iter().any(|other| **other == **name));
        let well = self.circuits.get(name).is_none_or(|circuit| circuit.lets_through(now));
        let rejected = !self.nodes.may_be_asked(name, &hello.build);
        let draining = peer.load.as_ref().is_some_and(|(load, _)| load.draining);
        named
            && well
            && !rejected
            && !draining
            && hello.serves_prefill
            && positions <= hello.max_positions as usize
            && hello.window >= self.facts.window
            && Fit::of(&self.facts, hello) == Fit::Exact
    }

    fn decide(&mut self, question: u32, now: Instant) {
        let Some(asked) = self.questions.remove(&question) else { return };
        self.counters.quote_time.record(asked.began.elapsed());
        let (held, cut) = (asked.query.known(), asked.ids.len());
        let peers = self.peers.list();
        let peer = |name: &Arc<str>| peers.iter().find(|peer| peer.peer.name == *name);
        let answers: Vec<_> = asked.answers.iter().filter(|(_, quoted)| quoted.refused.is_none()).collect();
        let here = local_time(&asked.query);
        let offer_of = |(name, quoted): &&(Arc<str>, Quoted)| {
            let mut offer = offer(quoted, peer(name), self.bytes, held, cut);
            if quoted.compute_ms == 0 && quoted.known as usize + BLOCK_LEN < cut {
                // It has measured nothing yet: it is taken to be like this one.
                offer.compute = here.unwrap_or_default();
            }
            offer
        };
        let offers: Vec<_> = answers.iter().map(offer_of).collect();
        let local = here.filter(|_| self.options.preference == Preference::Soonest);
        let order = soonest(&offers, local, u64::from(question));
        let Some(&first) = order.first() else {
            let counter =
                if offers.is_empty() { &self.counters.no_node } else { &self.counters.local_sooner };
            Counters::add(counter, 1);
            return;
        };
        let draft_of = |index: usize| {
            let hello = peer(&answers[index].0).and_then(|peer| peer.hello.as_ref());
            hello.is_some_and(|hello| self.facts.draft != [0; 32] && hello.draft == self.facts.draft)
        };
        let with_draft = draft_of(first);
        let nodes: VecDeque<_> = order
            .iter()
            .filter(|&&index| draft_of(index) || !with_draft)
            .map(|&index| (Arc::clone(&answers[index].0), offers[index].total()))
            .collect();
        let (_, quoted) = answers[first];
        let rate = peer(&answers[first].0).and_then(|peer| peer.link_rate);
        let stages = self.stages(held, cut, quoted.known as usize, quoted.compute_ms, rate);
        let budget = asked.query.time_left().unwrap_or(self.options.budget).min(self.options.budget);
        let job = Job {
            scope: asked.query.scope(),
            pace: Arc::new(*asked.query.pace()),
            priority: (128 - asked.query.priority().clamp(-127, 128)).clamp(0, 255) as u8,
            landing: Arc::new(Landing::new(self.facts.planes.clone())),
            until: now + budget,
            began: None,
            progress: Arc::default(),
            known: held as u32,
            ids: asked.ids,
            stages: stages.clone(),
            nodes,
            with_draft,
            delivery: None,
            wanted: Vec::new(),
            stage_end: 0,
            ready: 0,
            held: Vec::new(),
            request: None,
            series: None,
            turns: 0,
            asked_again: false,
            kept: None,
            retry: None,
        };
        let id = NUMBERS.next();
        self.jobs.insert(id, job);
        let tell = Mutex::new(self.tell.clone());
        asked.query.answer(Some(Arc::new(HandedPrefix { job: id, positions: cut, stages, tell })));
    }

    /// Where a prefix is to become known on the way: far apart, for each costs a window, and only where the link bears it.
    fn stages(&self, held: usize, cut: usize, known: usize, compute_ms: u32, rate: Option<f64>) -> Vec<u32> {
        let rows = cut.saturating_sub(known.max(held)) as f64;
        let needed = self.bytes.full_row as f64 * rows / (f64::from(compute_ms.max(1)) / 1e3);
        let bears = rate.is_some_and(|rate| needed * ROOM <= rate);
        if self.options.preference == Preference::Soonest && !bears {
            return Vec::new();
        }
        let most = cut / (MAX_STAGES - 1);
        let every = (self.options.stage_every as usize).max(most).next_multiple_of(BLOCK_LEN).max(BLOCK_LEN);
        // What the node knows comes at once.
        (every..cut)
            .step_by(every)
            .filter(|&stage| stage > held.max(known))
            .map(|stage| stage as u32)
            .collect()
    }
}

/// A prompt on its way.
impl Consumer {
    /// The engine has memory for the next blocks.
    fn begin_stage(&mut self, id: JobId, wanted: Vec<Block>, delivery: BlockReceiver) {
        let Some(job) = self.jobs.get_mut(&id) else {
            delivery.fail(RestoreFailure::Store, None);
            return;
        };
        let stage = job.boundary(&wanted);
        let tell = self.tell.clone();
        delivery.on_end(move |imported| {
            let _ = tell.send(Told::StageEnded { job: id, stage, imported });
        });
        let asked = job.request.is_some() || job.series.is_some();
        // Something that a node was told is held has left memory since: it must be asked for after all.
        let goes_on = asked && stage <= job_cut(job) && !wanted.iter().any(|block| job.held.contains(block));
        job.stage_end = stage;
        job.wanted = wanted;
        job.delivery = Some(delivery);
        if goes_on {
            self.open(id);
            if self.jobs.get(&id).is_some_and(|job| job.ready >= stage) {
                self.deliver(id);
            } else if self.jobs.get(&id).is_some_and(|job| job.request.is_none()) {
                self.request_next(id, Instant::now());
            }
        } else {
            let (cut, stages) = (job.cut(), job.stages.clone());
            self.begin_series(id, cut, stages);
        }
    }

    /// Memory for the stage's blocks.
    fn open(&mut self, id: JobId) {
        let Some(job) = self.jobs.get(&id) else { return };
        let cut = job.cut() as usize;
        let unfinished = (!cut.is_multiple_of(BLOCK_LEN)).then_some(cut / BLOCK_LEN);
        if let Some(delivery) = &job.delivery {
            job.landing.open(&job.wanted, unfinished, job.with_draft, delivery);
        }
    }

    /// Asks for everything from here to `cut`.
    fn begin_series(&mut self, id: JobId, cut: u32, stages: Vec<u32>) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if let Some(request) = job.request.take() {
            request.fetching.cancel();
        }
        job.series = None;
        job.ready = 0;
        job.landing.forget_early();
        let stages = stages.into_iter().filter(|&stage| stage >= job.stage_end && stage < cut).collect();
        let wanted = Wanted {
            identity: self.facts.identity,
            draft: if job.with_draft { self.facts.draft } else { [0; 32] },
            tenant: self.peers.tenant(&job.scope),
            ids: job.ids[..cut as usize].into(),
            planes: self.facts.planes.select(job.with_draft),
            span: Span { cut, stages, window: self.facts.window },
        };
        let blocks = (job.stage_end as usize).div_ceil(BLOCK_LEN);
        let has =
            |group, block: u32| (block as usize) < blocks && !job.wanted.contains(&(group, block as usize));
        let series = Nonce::fresh().and_then(|nonce| Series::new(nonce, wanted, has).ok());
        let Some(series) = series else {
            self.give_up(id, RestoreFailure::Store);
            return;
        };
        let held = series.plan().blocks().filter(|&(group, block)| has(group, block));
        job.held = held.map(|(group, block)| (group, block as usize)).collect();
        job.series = Some(Box::new(series));
        self.open(id);
        self.request_next(id, Instant::now());
    }

    /// Goes on with the soonest of the nodes that are left, or here.
    fn request_next(&mut self, id: JobId, now: Instant) {
        loop {
            let Some(job) = self.jobs.get_mut(&id) else { return };
            let Some((node, takes)) = job.nodes.front().cloned() else {
                self.give_up(id, RestoreFailure::Store);
                return;
            };
            let first = job.turns == 0;
            let cut = job.ids.len();
            // Another node may have to begin at the beginning.
            let here = job.local_rest().filter(|_| !first && self.options.preference == Preference::Soonest);
            let peers = self.peers.list();
            let peer = peers.iter().find(|peer| peer.peer.name == node);
            let could = peer.is_some_and(|peer| self.could_read(peer, cut, now));
            if could && here.is_none_or(|here| takes < here) {
                if first {
                    Counters::add(&self.counters.begun, 1);
                }
                self.request(id, &node);
                return;
            }
            if let Some(job) = self.jobs.get_mut(&id) {
                job.nodes.pop_front();
            }
        }
    }

    /// Asks a node for what lacks of the series.
    fn request(&mut self, id: JobId, node: &Arc<str>) {
        let is_looked_after = self.is_looked_after(node);
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let Some(series) = job.series.take() else { return };
        // What two nodes brought together says nothing of either.
        job.kept = (is_looked_after && series.received().is_empty()).then(Kept::default);
        self.circuits.entry(Arc::clone(node)).or_default().note_chosen();
        job.turns += 1;
        job.retry = None;
        let turn = job.turns;
        let cut = series.plan().span().cut;
        let sink = JobSink {
            job: id,
            turn,
            landing: Arc::clone(&job.landing),
            counters: Arc::clone(&self.counters),
            kept: job.kept.clone(),
            progress: Arc::clone(&job.progress),
            tell: Mutex::new(self.tell.clone()),
        };
        let budget = job.until.saturating_duration_since(Instant::now());
        let fetch = Fetch { series: *series, budget, priority: job.priority };
        let fetching = self.peers.fetch(node, fetch, Arc::new(sink));
        job.request = Some(Request { node: Arc::clone(node), turn, fetching, cut });
        job.began.get_or_insert_with(Instant::now);
        self.nodes.note_running(id, node, job.cut(), &job.progress);
    }

    /// A node that has begun behind a stage cannot give its window: then the stage is asked for by itself.
    fn note_begun(&mut self, id: JobId, turn: u32, stages: &[u32]) {
        let Some(job) = self.jobs.get(&id).filter(|job| job.is_current(turn)) else { return };
        let given = job.request.as_ref().is_some_and(|request| request.cut == job.stage_end)
            || stages.contains(&job.stage_end);
        if !given && job.delivery.is_some() && job.ready < job.stage_end {
            let stage = job.stage_end;
            self.begin_series(id, stage, Vec::new());
        }
    }

    /// Hands a stage to the engine if all of it is there and bound.
    fn deliver(&mut self, id: JobId) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if job.delivery.is_some() && job.ready >= job.stage_end {
            job.delivery = None;
            job.landing.deliver();
        }
    }

    /// The engine has imported a stage, or wants it no more.
    fn end_stage(&mut self, id: JobId, stage: u32, imported: bool) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if !imported {
            self.drop_job(id);
            return;
        }
        Counters::add(&self.counters.stages, 1);
        job.known = job.known.max(stage);
        if let Some(request) = &job.request {
            request.fetching.installed(stage);
        }
    }

    fn compare_with_here(&mut self, id: JobId, turn: u32, rest: Duration) {
        let Some(job) = self.jobs.get(&id).filter(|job| job.is_current(turn)) else { return };
        let here = job.local_rest().filter(|_| self.options.preference == Preference::Soonest);
        if here.is_some_and(|here| here.mul_f64(CLEARLY) < rest) {
            Counters::add(&self.counters.overtaken, 1);
            self.give_up(id, RestoreFailure::Slow);
        }
    }

    fn end_request(&mut self, id: JobId, turn: u32, series: Box<Series>, end: &FetchEnd, now: Instant) {
        let Some(job) = self.jobs.get_mut(&id).filter(|job| job.is_current(turn)) else { return };
        let Some(request) = job.request.take() else { return };
        let node = request.node;
        let circuit = self.circuits.entry(Arc::clone(&node)).or_default();
        match end {
            FetchEnd::Installed => {
                circuit.note_success();
                if job.known >= job.cut() {
                    Counters::add(&self.counters.installed, 1);
                    if let Some(began) = job.began {
                        self.counters.transfer_time.record(began.elapsed());
                    }
                    self.audit(id, node);
                    self.drop_job(id);
                }
                return;
            }
            FetchEnd::Lost | FetchEnd::Silent | FetchEnd::Refused(_) => circuit.note_fault(now),
            FetchEnd::Peer(Reason::Device | Reason::Internal | Reason::Refused | Reason::Silent) => {
                circuit.note_fault(now);
            }
            FetchEnd::Peer(_) | FetchEnd::Late | FetchEnd::Cancelled => circuit.note_nothing(),
        }
        tracing::warn!(node = &*node, "a hand-off goes on without its node: {end}");
        job.series = Some(series);
        if job.nodes.front().is_some_and(|(name, _)| *name == node) {
            job.nodes.pop_front();
        }
        if matches!(end, FetchEnd::Late | FetchEnd::Cancelled) {
            self.give_up(id, RestoreFailure::Slow);
            return;
        }
        let once_more = matches!(end, FetchEnd::Lost | FetchEnd::Peer(Reason::Gone)) && !job.asked_again;
        if once_more {
            job.asked_again = true;
            job.retry = Some(Retry { node, at: now, until: now + RECONNECT });
            self.look_again(id, now);
        } else {
            self.go_elsewhere(id, now);
        }
    }

    /// Is a hand-off of the node to be looked after: its first, or one in so many?
    fn is_looked_after(&self, node: &Arc<str>) -> bool {
        self.installed.get(node).copied().unwrap_or_default().is_multiple_of(ONE_IN)
    }

    /// Has rows of a hand-off compared with what is computed here: those of its beginning, or those behind its last stage.
    fn audit(&mut self, id: JobId, node: Arc<str>) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let count = self.installed.entry(Arc::clone(&node)).or_default();
        let stage = job.stages.last().filter(|_| !(*count / ONE_IN).is_multiple_of(2));
        *count += 1;
        let Some(kept) = job.kept.take() else { return };
        let from = match stage {
            Some(&stage) => AuditFrom::Stage(stage as usize),
            None => {
                AuditFrom::Start(std::mem::take(&mut *kept.lock().unwrap_or_else(PoisonError::into_inner)))
            }
        };
        if let Some(audits) = &*self.nodes.audits.lock().unwrap_or_else(PoisonError::into_inner) {
            let _ = audits.send(Audit { node, ids: Arc::clone(&job.ids), scope: job.scope, from });
        }
    }

    /// Asks the same node once more if it can be reached; another one, if there is one, does not wait for that.
    fn look_again(&mut self, id: JobId, now: Instant) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let Some(retry) = job.retry.take() else { return };
        let connected = self.peers.list().iter().any(|peer| peer.peer.name == retry.node && peer.connected);
        if connected {
            Counters::add(&self.counters.resumed, 1);
            self.request(id, &retry.node);
        } else if job.nodes.is_empty() && now < retry.until {
            job.retry = Some(Retry { at: now + LOOK, ..retry });
        } else {
            self.go_elsewhere(id, now);
        }
    }

    fn go_elsewhere(&mut self, id: JobId, now: Instant) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.asked_again = false;
        if !job.nodes.is_empty() {
            Counters::add(&self.counters.moved, 1);
        }
        self.request_next(id, now);
    }

    /// The rest is computed here.
    fn give_up(&mut self, id: JobId, why: RestoreFailure) {
        if let Some(job) = self.jobs.get(&id) {
            Counters::add(&self.counters.given_up, 1);
            if let Some(delivery) = &job.delivery {
                delivery.fail(why, None);
            }
        }
        self.drop_job(id);
    }

    fn drop_job(&mut self, id: JobId) {
        let Some(job) = self.jobs.remove(&id) else { return };
        self.nodes.note_over(id);
        job.landing.close();
        if let Some(request) = job.request {
            self.circuits.entry(request.node).or_default().note_nothing();
            request.fetching.cancel();
        }
        if let Some(delivery) = job.delivery {
            delivery.fail(RestoreFailure::Store, None);
        }
    }
}

/// Where the series of a job ends.
fn job_cut(job: &Job) -> u32 {
    let of_series = job.series.as_ref().map(|series| series.plan().span().cut);
    job.request.as_ref().map(|request| request.cut).or(of_series).unwrap_or_default()
}

/// What computing a prompt here would take, what is before it included.
fn local_time(query: &PrefixQuery) -> Option<Duration> {
    let pace = query.pace();
    Some(pace.ahead() + pace.time(query.known(), query.units().len())?)
}

/// Says that there is no answer if it is dropped without one.
struct Quoting {
    question: u32,
    node: Arc<str>,
    tell: Option<Sender<Told>>,
}

impl Quoting {
    fn say(&mut self, quoted: Option<Quoted>) {
        if let Some(tell) = self.tell.take() {
            let (question, node) = (self.question, Arc::clone(&self.node));
            let _ = tell.send(Told::Quoted { question, node, quoted });
        }
    }
}

impl Drop for Quoting {
    fn drop(&mut self) {
        self.say(None);
    }
}
