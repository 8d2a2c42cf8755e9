//! A session ends with what it held, and an engine gets on with a store that answers badly: without one.

use std::borrow::Cow;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvloft_core::batch::{ChunkBatch, Columns};
use kvloft_core::evict::Eviction;
use kvloft_core::io::FrameId;
use kvloft_core::key::{ChunkKey, KeyChain};
use kvloft_core::session::{ArenaInfo, EngineSession, LeaseId, Local, Report, Session};
use kvloft_core::store::{LeasedFrame, Lookup, Prefix, Progress, Reservation, SaveRange, StoreConfig, TierName};
use kvloft_core::tickets::Tickets;

fn local(num_frames: u64) -> Local {
    let config = StoreConfig {
        frame_bytes: 4096,
        host_bytes: num_frames * 4096,
        blocks_per_chunk: 1,
        eviction: Eviction::parse("lru").expect("known"),
        available_bytes: None,
        namespace: [7; 32],
        disk: None,
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

type Calls = Arc<Mutex<Vec<(&'static str, Vec<u64>)>>>;

/// A store that reserves what it likes, and remembers what it was told.
#[derive(Debug)]
struct Odd {
    arena: ArenaInfo,
    rows: Vec<Reservation>,
    calls: Calls,
}

impl Odd {
    fn note(&self, call: &'static str, tickets: &[u64]) {
        self.calls.lock().expect("no panic").push((call, tickets.to_vec()));
    }
}

impl Session for Odd {
    fn arena(&self) -> &ArenaInfo {
        &self.arena
    }
    fn lookup(&self, _: Prefix<'_>) -> Lookup {
        Lookup::default()
    }
    fn acquire(&self, _: Prefix<'_>) -> LeaseId {
        LeaseId(0)
    }
    fn poll(&self, _: LeaseId) -> Progress {
        Progress::default()
    }
    fn frames(&self, _: LeaseId) -> Vec<LeasedFrame> {
        Vec::new()
    }
    fn release(&self, _: LeaseId) {}
    fn reserve(&self, _: Prefix<'_>, _: SaveRange) -> kvloft_core::Result<(Vec<Reservation>, u32)> {
        Ok((self.rows.clone(), 0))
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
    fn flush(&self, _: Duration) -> bool {
        true
    }
    fn close(&self, _: Duration) {}
}

fn row(ticket: u64, first_block: u32, num_blocks: u32) -> Reservation {
    Reservation { ticket, frame: FrameId(9), key: ChunkKey([2; 32]), first_block, num_blocks }
}

fn odd(rows: Vec<Reservation>) -> (EngineSession, Calls) {
    let calls = Arc::default();
    let arena = ArenaInfo { path: String::new(), frame_bytes: 4096, num_frames: 10 };
    (EngineSession::new(Box::new(Odd { arena, rows, calls: Arc::clone(&calls) }), 2), calls)
}

#[test]
fn chunks_outside_the_block_table_are_given_back() {
    for outside in [row(6, 4, 1), row(6, 8, 1), row(6, 6, 3), row(6, u32::MAX, u32::MAX)] {
        let (engine, calls) = odd(vec![row(5, 5, 1), outside]);
        assert!(engine.reserve(Prefix::from(&chain(9)), whole(9), &[1, 2, 3], 5).is_err());
        assert_eq!(*calls.lock().expect("no panic"), [("abort", vec![5, 6])]);
        assert_eq!(engine.num_in_flight(), 0);
    }
}

#[test]
fn the_store_hears_once_of_each_ticket() {
    let (engine, calls) = odd(vec![row(5, 0, 1), row(6, 1, 2), row(7, 3, 1)]);
    let (saves, _) = engine.reserve(Prefix::from(&chain(9)), whole(4), &[4, 5, 0, 7], 0).expect("in the table");
    assert_eq!(saves.tickets(), [5, 7], "a chunk with a null block has no KV");
    assert_eq!(engine.settle(&[5, 7], &[]), Report::default());
    assert_eq!(engine.settle(&[5], &[7]), Report { num_visible: 1, num_failed: 1 });
    assert_eq!(engine.settle(&[5, 7], &[7]), Report::default());
    engine.abort(&[5, 6, 7]);
    let every = calls.lock().expect("no panic");
    assert_eq!(*every, [("abort", vec![6]), ("abort", vec![7]), ("commit", vec![5])]);
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
    let (batch, by_tier) = ChunkBatch::of_loads(&[chunk(1, 0, 2), chunk(2, 3, 2)], &[10, 11, 12, 13, 14], 0);
    assert_eq!((batch.wanted_blocks().collect::<Vec<_>>(), by_tier.host), (vec![10, 11], 2));
    let (batch, by_tier) = ChunkBatch::of_loads(&[chunk(2, 3, 2)], &[10, 11], 2);
    assert_eq!((batch.len(), by_tier.host), (0, 0), "its first block is not there");
    let (batch, _) = ChunkBatch::of_loads(&[chunk(1, u32::MAX, u32::MAX)], &[10, 11], u32::MAX - 1);
    assert!(batch.is_empty());
}

#[test]
fn a_save_has_its_readers_until_it_is_settled() {
    let columns = Columns {
        frames: [1_u32, 2].map(u32::to_le_bytes).concat(),
        keys: vec![0; 64],
        num_blocks: [2_u32, 1].map(u32::to_le_bytes).concat(),
        blocks: [7_i32, 8, 8].map(i32::to_le_bytes).concat(),
        tickets: [1_u64, 2].map(u64::to_le_bytes).concat(),
    };
    let Columns { frames, keys, num_blocks, blocks, tickets } = &columns;
    let borrowed = Columns { frames: &frames[..], keys, num_blocks, blocks, tickets };
    let batch = Arc::new(ChunkBatch::from_columns(&borrowed).expect("a batch"));
    assert_eq!(batch.columns(), columns);
    let mut tickets = Tickets::new(1);
    assert!(tickets.add(&batch));
    tickets.settle(&[2], &[]);
    assert_eq!(tickets.read_among(&[9, 8, 7]), [8, 7], "the earlier save of a block waits longer");
    let mut tickets = Tickets::new(1);
    assert!(tickets.add(&batch));
    assert!(!tickets.add(&batch), "numbers are not used again");
    assert_eq!(tickets.read_among(&[9, 8, 7]), [8, 7]);
    tickets.settle(&[1], &[]);
    assert_eq!(tickets.read_among(&[9, 8, 7]), [8], "the other save reads it too");
    assert_eq!(tickets.forget(&[1, 2]), [2]);
    assert!(tickets.read_blocks().is_empty() && tickets.is_empty());
}
