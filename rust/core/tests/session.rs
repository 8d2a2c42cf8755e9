//! A session ends with what it held, and an engine gets on with a store that answers badly: without one.

use std::borrow::Cow;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvloft_core::batch::{ChunkBatch, Columns};
use kvloft_core::engine::{EngineSession, SaveRow};
use kvloft_core::evict::Eviction;
use kvloft_core::io::FrameId;
use kvloft_core::key::{ChunkKey, KeyChain};
use kvloft_core::session::{ArenaInfo, LeaseId, Local, Session};
use kvloft_core::store::{
    Changes, Got, LeasedFrame, Lookup, Prefix, Progress, Reservation, SaveRange, StoreConfig, TierName, ToSave,
};

fn local(num_frames: u64) -> Local {
    let config = StoreConfig {
        frame_bytes: 4096,
        host_bytes: num_frames * 4096,
        blocks_per_chunk: 1,
        eviction: Eviction::parse("lru").expect("known"),
        available_bytes: None,
        namespace: [7; 32],
        disk: None,
        now_s: 0,
        limits: kvloft_core::store::TenantLimits::default(),
    };
    Local::open(&config).expect("memory")
}

fn chain(num_blocks: u32) -> KeyChain {
    let mut chain = KeyChain::new(ChunkKey([1; 32]), 1).expect("a chain");
    chain.append_tokens(&(0..num_blocks).collect::<Vec<_>>()).expect("tokens");
    chain
}

fn whole(stop: u32) -> SaveRange {
    SaveRange { start: 0, stop, tail_blocks: 0 }
}

fn stat(session: &dyn Session, name: &str) -> u64 {
    session.stats().iter().find(|(key, _)| key == name).map(|(_, value)| *value).expect("a name")
}

#[test]
fn leases_and_reservations_are_numbers_that_may_be_used_after_their_end() {
    let session = local(8);
    let chain = chain(3);
    let (rows, num_dropped) = session.reserve(Prefix::from(&chain), whole(3)).expect("in range");
    let tickets: Vec<_> = rows.iter().map(|row| row.ticket).collect();
    assert_eq!((rows.len(), num_dropped), (3, 0));
    assert_eq!(session.commit(&tickets[..2]), 2);
    session.abort(&tickets);
    assert_eq!((session.commit(&tickets), stat(&session, "frames_reserved")), (0, 0));

    let lease = session.acquire(Prefix::from(&chain));
    assert_eq!(session.poll(lease), Progress { ready_blocks: 2, pending_blocks: 0 });
    assert_eq!((session.frames(lease).len(), stat(&session, "pins")), (2, 2));
    session.release(lease);
    session.release(lease);
    assert_eq!(stat(&session, "pins"), 0);
    assert_eq!((session.poll(lease), session.frames(lease)), (Progress::default(), Vec::new()));
    assert_ne!(session.acquire(Prefix::from(&chain)), lease, "a number is never used again");
}

#[test]
fn nothing_is_reserved_if_one_prefix_has_not_got_its_range() {
    let session = local(8);
    let (long, short) = (chain(3), chain(2));
    let asked = [(Prefix::from(&long), whole(3)).into(), (Prefix::from(&short), whole(3)).into()];
    assert!(session.reserve_many(&asked).is_err());
    assert_eq!((session.num_open(), stat(&session, "frames_reserved")), ((0, 0), 0));
    assert_eq!(session.reserve(Prefix::from(&short), whole(2)).expect("in range").0.len(), 2, "the store goes on");
}

#[test]
fn what_a_save_replaces_is_there_until_the_save_is() {
    let engine = EngineSession::new(Box::new(local(8)), 1);
    let save = |root: u8, replaced| {
        let mut chain = KeyChain::new(ChunkKey([root; 32]), 1).expect("a chain");
        chain.append_tokens(&[1]).expect("tokens");
        let row = SaveRow { what: (Prefix::from(&chain), whole(1)).into(), table: &[5], first: 0, each: 1, replaced };
        let (batch, _) = engine.reserve(&[row]).expect("in range").pop().expect("one for one");
        (chain, batch)
    };
    let is_there = |chain: &KeyChain| engine.session().lookup(Prefix::from(chain)).host_blocks == 1;
    let (first, batch) = save(1, None);
    engine.settle(batch.tickets(), &[]);
    let key = Some(first.keys()[0]);
    let (_, failed) = save(2, key);
    engine.settle(&[], failed.tickets());
    assert!(is_there(&first), "what should have replaced it failed");
    let (second, batch) = save(3, key);
    assert!(is_there(&first));
    engine.settle(batch.tickets(), &[]);
    assert_eq!((is_there(&first), is_there(&second)), (false, true));
}

type Calls = Arc<Mutex<Vec<(&'static str, Vec<u64>)>>>;

/// A store that reserves what it likes, and remembers what it was told.
#[derive(Debug)]
struct Odd {
    /// What each call reserves.
    rows: Mutex<Vec<Vec<Reservation>>>,
    calls: Calls,
}

impl Odd {
    fn note(&self, call: &'static str, tickets: &[u64]) {
        self.calls.lock().expect("no panic").push((call, tickets.to_vec()));
    }
}

impl Session for Odd {
    fn arena(&self) -> Option<ArenaInfo> {
        None
    }
    fn lookup_many(&self, prefixes: &[Prefix<'_>]) -> Vec<Lookup> {
        vec![Lookup::default(); prefixes.len()]
    }
    fn acquire_all(&self, _: &[Prefix<'_>]) -> LeaseId {
        LeaseId(0)
    }
    fn poll(&self, _: LeaseId) -> Progress {
        Progress::default()
    }
    fn frames(&self, _: LeaseId) -> Vec<LeasedFrame> {
        Vec::new()
    }
    fn release(&self, _: LeaseId) {}
    fn reserve_many(&self, asked: &[ToSave<'_>]) -> kvloft_core::Result<(Vec<Reservation>, Vec<Got>)> {
        let each: Vec<_> = asked.iter().map(|_| self.rows.lock().expect("no panic").remove(0)).collect();
        let got = each.iter().map(|own| Got { num_reserved: own.len(), num_dropped: 0 }).collect();
        Ok((each.concat(), got))
    }
    fn commit(&self, tickets: &[u64]) -> u32 {
        self.note("commit", tickets);
        u32::try_from(tickets.len()).expect("few")
    }
    fn abort(&self, tickets: &[u64]) {
        self.note("abort", tickets);
    }
    fn discard(&self, _: &[ChunkKey]) -> u64 {
        0
    }
    fn clear(&self) {}
    fn stats(&self) -> Vec<(Cow<'static, str>, u64)> {
        Vec::new()
    }
    fn limit_frames(&self, _: u32) {}
    fn take_events(&self) -> Vec<String> {
        Vec::new()
    }
    fn watch(&self, _: usize) {}
    fn changes(&self, asked: &[ChunkKey], _: usize) -> Changes {
        Changes::of_none(asked)
    }
    fn flush(&self, _: Duration) -> bool {
        true
    }
    fn close(&self, _: Duration) {}
}

fn row(ticket: u64, first_block: u32, num_blocks: u32) -> Reservation {
    Reservation { ticket, frame: FrameId(9), key: ChunkKey([2; 32]), first_block, num_blocks }
}

/// Of a prefix of `num_blocks` blocks, the first `stop` chunks.
fn reserve(
    engine: &EngineSession,
    num_blocks: u32,
    stop: u32,
    table: &[i32],
    first: u32,
) -> kvloft_core::Result<(Arc<ChunkBatch>, u32)> {
    let chain = chain(num_blocks);
    let row = SaveRow { what: (Prefix::from(&chain), whole(stop)).into(), table, first, each: 1, replaced: None };
    engine.reserve(&[row]).map(|mut reserved| reserved.pop().expect("one for one"))
}

fn odd<const N: usize>(num_ranks: u32, rows: &[Vec<Reservation>; N]) -> (EngineSession, Calls) {
    let calls = Arc::default();
    let odd = Odd { rows: Mutex::new(rows.to_vec()), calls: Arc::clone(&calls) };
    (EngineSession::new(Box::new(odd), num_ranks), calls)
}

#[test]
fn chunks_outside_the_block_table_are_given_back() {
    for outside in [row(6, 4, 1), row(6, 8, 1), row(6, 6, 3), row(6, u32::MAX, u32::MAX)] {
        let (engine, calls) = odd(2, &[vec![row(5, 5, 1), outside]]);
        assert!(reserve(&engine, 9, 9, &[1, 2, 3], 5).is_err());
        assert_eq!(*calls.lock().expect("no panic"), [("abort", vec![5, 6])]);
        assert_eq!(engine.num_in_flight(), 0);
    }
}

#[test]
fn the_store_hears_once_of_each_ticket() {
    let (engine, calls) = odd(2, &[vec![row(5, 0, 1), row(6, 1, 2), row(7, 3, 1)]]);
    let (saves, _) = reserve(&engine, 9, 4, &[4, 5, 0, 7], 0).expect("in the table");
    assert_eq!(saves.tickets(), [1, 2], "a chunk with a null block has no KV");
    assert_eq!(engine.settle(&[1, 2], &[]), (0, 0));
    assert_eq!(engine.settle(&[1], &[2]), (1, 1));
    assert_eq!(engine.settle(&[1, 2], &[2]), (0, 0));
    engine.abort(&[1, 2, 3]);
    let every = calls.lock().expect("no panic");
    assert_eq!(*every, [("abort", vec![6]), ("abort", vec![7]), ("commit", vec![5])]);
}

/// Reports of the store's first life come late. They must not settle what has the same numbers now.
#[test]
fn a_store_that_begins_anew_uses_its_numbers_again() {
    let (engine, calls) = odd(1, &[vec![row(1, 0, 1), row(2, 1, 1)], vec![row(1, 0, 1)], vec![row(2, 1, 1)]]);
    let again = || reserve(&engine, 9, 2, &[4, 5], 0).expect("in the table").0;
    let (before, after, last) = (again(), again(), again());
    assert_eq!(engine.num_in_flight(), 4);
    assert_eq!(engine.settle(before.tickets(), &[]), (0, 2));
    engine.abort(before.tickets());
    assert!(calls.lock().expect("no panic").is_empty(), "the store does not know of them");
    assert_eq!(engine.settle(after.tickets(), &[]), (1, 0));
    engine.abort(last.tickets());
    assert_eq!(*calls.lock().expect("no panic"), [("commit", vec![1]), ("abort", vec![2])]);
    assert_eq!(engine.num_in_flight(), 0);
}

#[test]
fn blocks_with_negative_numbers_are_not_copied() {
    let (engine, calls) = odd(1, &[vec![row(5, 0, 2)]]);
    assert!(reserve(&engine, 9, 2, &[4, -1], 0).is_err());
    assert_eq!(*calls.lock().expect("no panic"), [("abort", vec![5])]);
    let leased =
        LeasedFrame { frame: FrameId(1), key: ChunkKey([3; 32]), first_block: 0, num_blocks: 2, tier: TierName::Host };
    for table in [[-1, 4], [4, -1], [4, -2]] {
        assert!(ChunkBatch::of_loads(&[leased], &table, 0).is_err());
    }
}

#[test]
fn a_load_ends_before_the_first_block_that_is_not_there() {
    let chunk = |frame, first_block, num_blocks| LeasedFrame {
        frame: FrameId(frame),
        key: ChunkKey([3; 32]),
        first_block,
        num_blocks,
        tier: TierName::Host,
    };
    let (batch, by_tier) =
        ChunkBatch::of_loads(&[chunk(1, 0, 2), chunk(2, 3, 2)], &[10, 11, 12, 13, 14], 0).expect("blocks");
    assert_eq!((batch.wanted_blocks().collect::<Vec<_>>(), by_tier.host), (vec![10, 11], 2));
    let (batch, by_tier) = ChunkBatch::of_loads(&[chunk(2, 3, 2)], &[10, 11], 2).expect("blocks");
    assert_eq!((batch.len(), by_tier.host), (0, 0), "its first block is not there");
    let (batch, _) = ChunkBatch::of_loads(&[chunk(1, u32::MAX, u32::MAX)], &[10, 11], u32::MAX - 1).expect("blocks");
    assert!(batch.is_empty());
}

#[test]
fn columns_become_a_batch_and_back() {
    let columns = Columns {
        frames: [1_u32, 2].map(u32::to_le_bytes).concat(),
        keys: vec![0; 64],
        num_blocks: [2_u32, 1].map(u32::to_le_bytes).concat(),
        blocks: [7_i32, 8, 8].map(i32::to_le_bytes).concat(),
        tickets: [1_u64, 2].map(u64::to_le_bytes).concat(),
    };
    let Columns { frames, keys, num_blocks, blocks, tickets } = &columns;
    let borrowed = Columns { frames: &frames[..], keys, num_blocks, blocks, tickets };
    assert_eq!(ChunkBatch::from_columns(&borrowed).expect("a batch").columns(), columns);
}

#[test]
fn a_save_has_its_readers_until_it_is_settled() {
    let begin = || {
        let (engine, _) = odd(1, &[vec![row(1, 0, 2), row(2, 2, 1)]]);
        reserve(&engine, 9, 3, &[7, 8, 8], 0).expect("in the table");
        engine
    };
    let engine = begin();
    engine.settle(&[2], &[]);
    assert_eq!(engine.being_read(Some(&[9, 8, 7])), [8, 7], "the earlier save of a block waits longer");
    let engine = begin();
    assert_eq!(engine.being_read(Some(&[9, 8, 7])), [8, 7]);
    engine.settle(&[1], &[]);
    assert_eq!(engine.being_read(Some(&[9, 8, 7])), [8], "the other save reads it too");
    engine.abort(&[1, 2]);
    assert!(engine.being_read(None).is_empty() && engine.num_in_flight() == 0);
}
