//! Tests that batched calls return the same results as single calls, in this process and over a
//! socket.

mod common;

use kvloft_core::io::SizeClass;
use std::ops::Range;
use std::time::Duration;

use common::{FRAME, chain, connect, save, serve, server_config};
use kvloft_core::ChunkKey;
use kvloft_core::evict::Eviction;
use kvloft_core::session::{LeaseId, Local, Session};
use kvloft_core::store::{
    LeasedFrame, Prefix, Progress, Reservation, Reserved, SaveRequest, StoreConfig,
};
use kvloft_testing::one_prefix::SessionExt;
use kvloft_wire::protocol::MAX_PREFIXES;
use kvloft_wire::{Server, ServerConfig};
use proptest::collection::vec;
use proptest::prelude::*;

const NUM_FRAMES: u64 = 10;
const GROUP: u32 = 5;

/// A part of a prompt: chunks of the chain, or independent chunks of a group.
#[derive(Debug, Clone, Copy)]
struct Part {
    prompt: u32,
    start: u32,
    stop: u32,
    is_independent: bool,
}

#[derive(Debug, Clone)]
enum Step {
    Lookup(Vec<Part>),
    Acquire(Vec<Part>),
    Reserve(Vec<Part>),
    Release(prop::sample::Index),
    /// Aborts tickets divisible by 4 and commits the rest.
    Settle,
}

fn part() -> impl Strategy<Value = Part> {
    (0..3_u32, 0..8_u32, 0..8_u32, any::<bool>()).prop_map(
        |(prompt, one, other, is_independent)| Part {
            prompt,
            start: one.min(other),
            stop: one.max(other),
            is_independent,
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        vec(part(), 0..5).prop_map(Step::Lookup),
        vec(part(), 0..5).prop_map(Step::Acquire),
        vec(part(), 0..5).prop_map(Step::Reserve),
        any::<prop::sample::Index>().prop_map(Step::Release),
        Just(Step::Settle),
    ]
}

/// Keys of a part. Each key is derived from the previous key or from the root key.
struct Asked {
    root: ChunkKey,
    keys: Vec<ChunkKey>,
    units: Range<u32>,
    is_independent: bool,
}

impl Asked {
    fn new(part: &Part) -> Self {
        let (own, is_independent) = (chain(part.prompt, part.stop), part.is_independent);
        if !is_independent {
            let units = part.start..part.stop;
            return Self { root: own.root(), keys: own.keys().to_vec(), units, is_independent };
        }
        let (root, keys) = own
            .independent_keys(GROUP, part.start..part.stop)
            .expect("the blocks of the part exist");
        Self { root, keys, units: 0..(part.stop - part.start), is_independent }
    }

    fn to_save(&self) -> SaveRequest<'_> {
        let prefix = Prefix::new(self.root, &self.keys);
        let (class, is_independent) = (SizeClass(0), self.is_independent);
        SaveRequest { prefix, units: self.units.clone(), class, is_independent }
    }

    fn prefixes(&self) -> Vec<Prefix<'_>> {
        let (root, length) =
            (self.root, if self.is_independent { 1 } else { self.keys.len().max(1) });
        let each = self.keys.chunks(length).map(|keys| Prefix::new(root, keys));
        let none = (!self.is_independent && self.keys.is_empty()).then_some(Prefix::new(root, &[]));
        each.chain(none).collect()
    }

    /// Reserves the part's chunks, with one call per independent chunk.
    fn reserve_one_by_one(&self, session: &dyn Session) -> (Vec<Reservation>, u32) {
        if !self.is_independent {
            return session.reserve(self.prefixes()[0], self.units.clone()).expect("in range");
        }
        let (mut every, mut num_dropped) = (Vec::new(), 0);
        for (unit, prefix) in (0..).zip(self.prefixes()) {
            let (rows, dropped) = session.reserve(prefix, 0..1).expect("in range");
            every.extend(rows.into_iter().map(|row| Reservation { unit, ..row }));
            num_dropped += dropped;
        }
        (every, num_dropped)
    }
}

fn asked(parts: &[Part]) -> Vec<Asked> {
    parts.iter().map(Asked::new).collect()
}

/// Two stores with the same history: one gets batched calls, the other single calls.
struct Twins {
    at_once: Box<dyn Session>,
    one_by_one: Box<dyn Session>,
    leases: Vec<(LeaseId, Vec<LeaseId>)>,
    tickets: Vec<u64>,
}

impl Twins {
    fn take(&mut self, step: &Step) {
        match step {
            Step::Lookup(parts) => {
                let asked = asked(parts);
                let prefixes: Vec<_> = asked.iter().flat_map(Asked::prefixes).collect();
                let each: Vec<_> =
                    prefixes.iter().map(|prefix| self.one_by_one.lookup(*prefix)).collect();
                assert_eq!(self.at_once.lookup_many(&prefixes), each);
            }
            Step::Acquire(parts) => {
                let asked = asked(parts);
                let prefixes: Vec<_> = asked.iter().flat_map(Asked::prefixes).collect();
                let each = prefixes.iter().map(|prefix| self.one_by_one.acquire(*prefix)).collect();
                self.leases.push((self.at_once.acquire_all(&prefixes), each));
            }
            Step::Reserve(parts) => {
                let asked = asked(parts);
                let to_save: Vec<_> = asked.iter().map(Asked::to_save).collect();
                let reserved = self.at_once.reserve_many(&to_save).expect("in range");
                let each: Vec<_> = asked
                    .iter()
                    .map(|each| each.reserve_one_by_one(&*self.one_by_one))
                    .map(|(chunks, num_dropped)| Reserved { chunks, num_dropped })
                    .collect();
                assert_eq!(reserved, each);
                let chunks = reserved.iter().flat_map(|each| &each.chunks);
                self.tickets.extend(chunks.map(|row| row.ticket));
            }
            Step::Release(at) if !self.leases.is_empty() => {
                let (one, each) = self.leases.swap_remove(at.index(self.leases.len()));
                self.at_once.release(one);
                for lease in each {
                    self.one_by_one.release(lease);
                }
            }
            Step::Release(_) => {}
            Step::Settle => {
                let (saved, failed): (Vec<_>, Vec<_>) =
                    self.tickets.drain(..).partition(|ticket| ticket % 4 > 0);
                for session in [&self.at_once, &self.one_by_one] {
                    session.abort(&failed);
                    session.commit(&saved);
                }
            }
        }
    }

    fn check(&self) {
        for (one, each) in &self.leases {
            let every: Progress = each.iter().map(|lease| self.one_by_one.poll(*lease)).sum();
            assert_eq!(self.at_once.poll(*one), every);
            let frames: Vec<LeasedFrame> =
                each.iter().flat_map(|lease| self.one_by_one.frames(*lease)).collect();
            assert_eq!(self.at_once.frames(*one), frames);
        }
        let of_store = |session: &dyn Session| {
            let every = session.stats().into_iter().filter(|(name, _)| !name.starts_with("server"));
            every.collect::<Vec<_>>()
        };
        assert_eq!(of_store(&*self.at_once), of_store(&*self.one_by_one));
    }
}

fn local_config() -> StoreConfig {
    StoreConfig {
        frame_sizes: FRAME.into(),
        host_bytes: NUM_FRAMES * FRAME,
        eviction: Eviction::parse("lru").expect("known"),
        available_bytes: None,
        namespace: [7; 32],
        disk: None,
        now_s: 0,
        limits: kvloft_core::store::TenantLimits::default(),
    }
}

fn local() -> Box<dyn Session> {
    Box::new(Local::open(&local_config()).expect("memory"))
}

fn live(steps: &[Step], mut open: impl FnMut() -> Box<dyn Session>) {
    let mut twins =
        Twins { at_once: open(), one_by_one: open(), leases: Vec::new(), tickets: Vec::new() };
    for step in steps {
        twins.take(step);
        twins.check();
    }
    for session in [twins.at_once, twins.one_by_one] {
        session.close(Duration::ZERO);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn batch_equals_single_calls_in_this_process(steps in vec(step(), 0..20)) {
        live(&steps, local);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn batch_equals_single_calls_over_a_socket(steps in vec(step(), 0..20)) {
        let dirs = [tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory")];
        let config = |dir| ServerConfig { host_bytes: NUM_FRAMES * FRAME, ..server_config(dir) };
        let _servers = dirs.each_ref().map(|dir| Server::open(config(dir.path())).expect("a server"));
        let mut dirs = dirs.iter();
        live(&steps, || Box::new(connect(dirs.next().expect("two").path())));
    }
}

#[test]
fn large_batches_are_split_into_messages() {
    let dir = tempfile::tempdir().expect("a directory");
    let _server =
        Server::open(ServerConfig { host_bytes: 20_000 * FRAME, ..server_config(dir.path()) });
    let engine = connect(dir.path());
    let parts: Vec<_> =
        (0..3).map(|prompt| Part { prompt, start: 0, stop: 4000, is_independent: true }).collect();
    let asked = asked(&parts);
    let to_save: Vec<_> = asked.iter().map(Asked::to_save).collect();
    let reserved = engine.reserve_many(&to_save).expect("in range");
    let chunks = reserved.iter().flat_map(|each| &each.chunks);
    let tickets: Vec<_> = chunks.map(|chunk| chunk.ticket).collect();
    assert_eq!((tickets.len(), engine.commit(&tickets)), (12_000, 12_000));
    let prefixes: Vec<_> = asked.iter().flat_map(Asked::prefixes).collect();
    assert!(engine.lookup_many(&prefixes).iter().all(|found| found.host_units == 1));
    let lease = engine.acquire_all(&prefixes);
    assert_eq!((engine.poll(lease).ready_units, engine.frames(lease).len()), (12_000, 12_000));
    let too_many = vec![prefixes[0]; MAX_PREFIXES as usize + 1];
    assert_eq!(engine.poll(engine.acquire_all(&too_many)), Progress::default());
    assert_eq!(engine.poll(lease).ready_units, 12_000, "the connection must stay open");
}

/// If a call has more than one long prefix, only the first is cached. A single block is never
/// cached.
#[test]
fn both_ends_cache_the_same_prefix() {
    let dir = tempfile::tempdir().expect("a directory");
    let _server = serve(dir.path());
    let engine = connect(dir.path());
    let chains = [chain(1, 9), chain(2, 9), chain(1, 1), chain(1, 12), chain(2, 4), chain(1, 0)];
    assert_eq!((save(&engine, &chains[0]), save(&engine, &chains[1])), (9, 9));
    let prefixes: Vec<_> = chains.iter().map(Prefix::from).collect();
    let wanted = [9, 9, 1, 9, 4, 0];
    for first in 0..chains.len() {
        for second in 0..chains.len() {
            let found = engine.lookup_many(&[prefixes[first], prefixes[second]]);
            assert_eq!([found[0].host_units, found[1].host_units], [wanted[first], wanted[second]]);
            let lease = engine.acquire_all(&[prefixes[second], prefixes[first]]);
            assert_eq!(engine.poll(lease).ready_units, wanted[first] + wanted[second]);
        }
    }
}

/// Interleaves chats with prompts that never repeat, and returns the number of blocks found by the
/// chats. The store has space for half of the chats' blocks. Each turn saves a state for the next
/// turn, with or without the key of the state's chunk.
fn found_by_chats(session: &dyn Session, has_prefix: bool) -> u32 {
    const TURN: u32 = 3;
    let state = |prompt, end: u32| {
        let own = chain(prompt, end);
        let (root, mut keys) = own.independent_keys(GROUP, end - 1..end).expect("the block exists");
        keys.extend(own.keys().last().filter(|_| has_prefix));
        (root, keys)
    };
    let save = |prompt, end: u32| {
        let (own, (root, keys)) = (chain(prompt, end), state(prompt, end));
        let kv = SaveRequest {
            prefix: Prefix::new(own.root(), own.keys()),
            units: 0..end,
            class: SizeClass(0),
            is_independent: false,
        };
        let attached = SaveRequest {
            prefix: Prefix::new(root, &keys),
            units: 0..1,
            class: SizeClass(0),
            is_independent: true,
        };
        for asked in [kv, attached] {
            let reserved = session.reserve_many(&[asked]).expect("in range").remove(0);
            session.commit(&reserved.chunks.iter().map(|row| row.ticket).collect::<Vec<_>>());
        }
    };
    let mut num_found = 0;
    for turn in 1..10_u32 {
        for chat in 0..20 {
            let before = (turn - 1) * TURN;
            if before > 0 {
                let (own, (root, keys)) = (chain(chat, before), state(chat, before));
                let needs = [Prefix::new(own.root(), own.keys()), Prefix::new(root, &keys[..1])];
                let has: Vec<_> =
                    session.lookup_many(&needs).iter().map(|found| found.host_units).collect();
                if has == [before, 1] {
                    num_found += before;
                    session.release(session.acquire_all(&needs));
                }
            }
            save(chat, turn * TURN);
            save(1000 + turn * 20 + chat, 2 * TURN);
        }
    }
    num_found
}

const ROOM_FOR_CHATS: u64 = 300;

fn chats_in(mut open: impl FnMut() -> Box<dyn Session>) {
    let [with, without] = [true, false].map(|has_prefix| {
        let session = open();
        let found = found_by_chats(&*session, has_prefix);
        session.close(Duration::ZERO);
        found
    });
    assert!(with > without * 5 / 4, "{with} blocks, and {without} without");
}

/// Each turn has a new state. A state saved without its chunk's key would always be evicted before
/// the chunk.
#[test]
fn attached_states_with_a_chunk_key_get_more_hits() {
    chats_in(|| {
        let host_bytes = ROOM_FOR_CHATS * FRAME;
        let config = StoreConfig { host_bytes, eviction: Eviction::Adaptive, ..local_config() };
        Box::new(Local::open(&config).expect("memory"))
    });
}

#[test]
fn attached_states_with_a_chunk_key_get_more_hits_over_a_socket() {
    let dirs =
        [tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory")];
    let config = |dir| {
        let host_bytes = ROOM_FOR_CHATS * FRAME;
        ServerConfig { host_bytes, eviction: Eviction::Adaptive, ..server_config(dir) }
    };
    let _servers = dirs.each_ref().map(|dir| Server::open(config(dir.path())).expect("a server"));
    let mut dirs = dirs.iter();
    chats_in(|| Box::new(connect(dirs.next().expect("two").path())));
}
