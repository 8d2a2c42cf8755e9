//! Tests that a session releases everything it holds when it ends, and that an engine continues to
//! work if a store returns invalid results.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvloft_core::Event;
use kvloft_core::chunk_batch::{Chunk, ChunkBatch, Columns};
use kvloft_core::engine::{EngineSession, Group, GroupKind, SaveRow};
use kvloft_core::evict::Eviction;
use kvloft_core::io::FrameId;
use kvloft_core::key::{ChunkKey, KeyChain};
use kvloft_core::session::{ArenaInfo, LeaseId, Local, Session};
use kvloft_core::store::{
    Changes, DiskSettings, LeasedFrame, Lookup, Prefix, Progress, Reservation, Reserved,
    SaveRequest, Store, StoreConfig, TierName,
};
use kvloft_testing::one_prefix::SessionExt;

fn config(num_frames: u64) -> StoreConfig {
    StoreConfig {
        frame_sizes: 4096_u64.into(),
        host_bytes: num_frames * 4096,
        eviction: Eviction::parse("lru").expect("known"),
        available_bytes: None,
        namespace: [7; 32],
        disk: None,
        now_s: 0,
        limits: kvloft_core::store::TenantLimits::default(),
    }
}

fn local(num_frames: u64) -> Local {
    Local::open(&config(num_frames)).expect("memory")
}

fn chain(num_blocks: u32) -> KeyChain {
    chain_of(&(0..num_blocks).collect::<Vec<_>>())
}

fn chain_of(tokens: &[u32]) -> KeyChain {
    let mut chain = KeyChain::new(ChunkKey([1; 32]), 1).expect("a chain");
    chain.append_tokens(tokens).expect("tokens");
    chain
}

fn stat(session: &dyn Session, name: &str) -> u64 {
    session.stats().iter().find(|(key, _)| key == name).map(|(_, value)| *value).expect("a name")
}

#[test]
fn leases_and_reservations_are_numbers_that_may_be_used_after_their_end() {
    let session = local(8);
    let chain = chain(3);
    let (rows, num_dropped) = session.reserve(Prefix::from(&chain), 0..3).expect("in range");
    let tickets: Vec<_> = rows.iter().map(|row| row.ticket).collect();
    assert_eq!((rows.len(), num_dropped), (3, 0));
    assert_eq!(session.commit(&tickets[..2]), 2);
    session.abort(&tickets);
    assert_eq!((session.commit(&tickets), stat(&session, "frames_reserved")), (0, 0));

    let lease = session.acquire(Prefix::from(&chain));
    assert_eq!(session.poll(lease), Progress { ready_units: 2, pending_units: 0 });
    assert_eq!((session.frames(lease).len(), stat(&session, "pins")), (2, 2));
    session.release(lease);
    session.release(lease);
    assert_eq!(stat(&session, "pins"), 0);
    assert_eq!((session.poll(lease), session.frames(lease)), (Progress::default(), Vec::new()));
    assert_ne!(session.acquire(Prefix::from(&chain)), lease, "lease numbers must never be reused");
}

/// Returns two sessions with one store.
fn sessions(num_frames: u32) -> (Arc<Store>, [Local; 2]) {
    let store = Arc::new(Store::open(&config(num_frames.into())).expect("memory"));
    let open = || Local::of(Arc::clone(&store));
    (Arc::clone(&store), [open(), open()])
}

fn save(session: &Local, chain: &KeyChain) -> u32 {
    let num_units = u32::try_from(chain.keys().len()).expect("few");
    let (rows, _) = session.reserve(Prefix::from(chain), 0..num_units).expect("in range");
    session.commit(&rows.iter().map(|row| row.ticket).collect::<Vec<_>>())
}

fn num_found(store: &Store, chain: &KeyChain) -> u32 {
    store.lookup_many(&[Prefix::from(chain)])[0].stored_units
}

#[test]
fn chunks_below_an_unfinished_save_take_no_memory_from_others() {
    let (store, [hung, other]) = sessions(8);
    hung.reserve(Prefix::from(&chain(1)), 0..1).expect("in range");
    for number in 1..50 {
        assert_eq!(save(&other, &chain_of(&[0, number])), 0, "the first chunk is not visible yet");
        store.check().expect("consistent");
    }
    assert_eq!(save(&other, &chain_of(&[9, 8, 7])), 3);
    assert_eq!(num_found(&store, &chain_of(&[9, 8, 7])), 3);
}

#[test]
fn a_chunk_whose_save_hangs_is_saved_by_another_session() {
    let (store, [hung, other]) = sessions(8);
    let whole = chain(3);
    let (late, _) = hung.reserve(Prefix::from(&whole), 0..1).expect("in range");
    assert_eq!(save(&other, &whole), 0);
    hung.release_stale_keys();
    assert_eq!(save(&other, &whole), 0, "the save began after the previous call");
    hung.release_stale_keys();
    assert_eq!(stat(&other, "discards"), 0, "nothing was damaged");
    store.check().expect("consistent");
    assert_eq!((save(&other, &whole), num_found(&store, &whole)), (3, 3));
    assert_eq!(stat(&other, "frames_reserved"), 1, "the hung worker may write to its frame");
    assert_eq!((hung.commit(&[late[0].ticket]), num_found(&store, &whole)), (0, 3));
    assert_eq!((stat(&other, "frames_reserved"), hung.num_open()), (0, (0, 0)));
    hung.release_stale_keys();
    assert_eq!(num_found(&store, &whole), 3, "only unfinished saves lose their keys");
    store.check().expect("consistent");
}

#[test]
fn a_slow_save_that_nobody_waits_for_is_committed() {
    let (store, [slow, other]) = sessions(8);
    let whole = chain(3);
    for _ in 0..2 {
        let (rows, _) = slow.reserve(Prefix::from(&whole), 0..3).expect("in range");
        slow.release_stale_keys();
        slow.release_stale_keys();
        let tickets: Vec<_> = rows.iter().map(|row| row.ticket).collect();
        assert_eq!(slow.commit(&tickets), 3);
        assert_eq!(other.discard(&whole.keys()[..1]), 3);
    }
    let (rows, _) = slow.reserve(Prefix::from(&whole), 0..3).expect("in range");
    assert_eq!(save(&other, &whole), 0);
    slow.abort(&rows.iter().map(|row| row.ticket).collect::<Vec<_>>());
    let (rows, _) = slow.reserve(Prefix::from(&whole), 0..3).expect("in range");
    slow.release_stale_keys();
    slow.release_stale_keys();
    assert_eq!(slow.commit(&rows.iter().map(|row| row.ticket).collect::<Vec<_>>()), 3);
    assert_eq!(num_found(&store, &whole), 3, "the wait was for an earlier save");
}

#[test]
fn a_chunk_on_disk_keeps_its_key() {
    let dir = tempfile::tempdir().expect("a directory");
    let disk = DiskSettings {
        dir: dir.path().join("disk"),
        cap_bytes: 1 << 20,
        num_threads: 1,
        description: String::new(),
    };
    let settings = StoreConfig { disk: Some(disk), ..config(2) };
    let store = Arc::new(Store::open(&settings).expect("memory"));
    let session = Local::of(Arc::clone(&store));
    let whole = chain_of(&[1, 2]);
    assert_eq!(save(&session, &whole), 2);
    assert!(store.flush(Duration::from_secs(60)));
    assert_eq!(save(&session, &chain_of(&[3, 4])), 2, "takes the frames of the first prompt");
    assert!(store.flush(Duration::from_secs(60)));
    let (rows, _) = session.reserve(Prefix::from(&whole), 0..1).expect("in range");
    assert_eq!(rows.len(), 1);
    session.release_keys();
    session.abort(&[rows[0].ticket]);
    assert_eq!(num_found(&store, &whole), 2);
}

#[test]
fn nothing_is_reserved_if_one_prefix_is_too_short() {
    let session = local(8);
    let (long, short) = (chain(3), chain(2));
    let asked = [(Prefix::from(&long), 0..3).into(), (Prefix::from(&short), 0..3).into()];
    assert!(session.reserve_many(&asked).is_err());
    assert_eq!((session.num_open(), stat(&session, "frames_reserved")), ((0, 0), 0));
    assert_eq!(
        session.reserve(Prefix::from(&short), 0..2).expect("in range").0.len(),
        2,
        "the store must still work"
    );
}

type Calls = Arc<Mutex<Vec<(&'static str, Vec<u64>)>>>;

/// A store that returns scripted reservations and records its calls.
#[derive(Debug)]
struct Odd {
    /// Reservations returned for each request, in order.
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
    fn reserve_many(&self, asked: &[SaveRequest<'_>]) -> kvloft_core::Result<Vec<Reserved>> {
        let mut rows = self.rows.lock().expect("no panic");
        Ok(asked.iter().map(|_| Reserved { chunks: rows.remove(0), num_dropped: 0 }).collect())
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
    fn limit_memory(&self, _: u64) {}
    fn take_events(&self) -> Vec<Event> {
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

fn row(ticket: u64, unit: u32) -> Reservation {
    Reservation { ticket, frame: FrameId(9), key: ChunkKey([2; 32]), unit }
}

/// Reserves `units` of a prefix of `num_units` units. `blocks` lists the blocks of all groups.
fn reserve(
    engine: &EngineSession,
    num_units: u32,
    units: Range<u32>,
    blocks: &[i32],
) -> kvloft_core::Result<(Arc<ChunkBatch>, u32)> {
    let mut chain = chain(num_units);
    let mut rows = [SaveRow { chain: &mut chain, units, blocks }];
    engine.reserve(&mut rows).map(|mut reserved| reserved.pop().expect("one per request"))
}

fn odd<const N: usize>(num_ranks: u32, rows: &[Vec<Reservation>; N]) -> (EngineSession, Calls) {
    odd_with(vec![Group::ONLY], num_ranks, rows)
}

fn odd_with<const N: usize>(
    groups: Vec<Group>,
    num_ranks: u32,
    rows: &[Vec<Reservation>; N],
) -> (EngineSession, Calls) {
    let calls = Arc::default();
    let odd = Odd { rows: Mutex::new(rows.to_vec()), calls: Arc::clone(&calls) };
    (EngineSession::new(Box::new(odd), num_ranks, groups).expect("sizes"), calls)
}

/// A group with two blocks per unit.
const TWO: Group = Group { blocks_per_unit: 2, kept_blocks: 2, ..Group::ONLY };

#[test]
fn chunks_outside_the_block_table_are_released() {
    for outside in [row(6, 4), row(6, 8), row(6, u32::MAX)] {
        let (engine, calls) = odd(2, &[vec![row(5, 5), outside]]);
        assert!(reserve(&engine, 9, 5..8, &[1, 2, 3]).is_err());
        assert_eq!(*calls.lock().expect("no panic"), [("abort", vec![5, 6])]);
        assert_eq!(engine.num_in_flight(), 0);
    }
}

#[test]
fn a_chunk_has_as_many_blocks_as_its_group_keeps() {
    let (engine, _) = odd_with(vec![TWO], 1, &[vec![row(5, 3), row(6, 5)]]);
    let (saves, _) = reserve(&engine, 9, 3..6, &[1, 2, 3, 4, 5, 6]).expect("in the table");
    assert_eq!((saves.chunk(0).blocks, saves.chunk(1).blocks), (&[1, 2][..], &[5, 6][..]));
    assert!(
        saves.check(10, 7, 2).is_ok()
            && saves.check(10, 7, 3).is_err()
            && saves.check(10, 6, 2).is_err()
    );
}

#[test]
fn a_load_has_the_blocks_that_the_prefix_needs_and_vllm_lacks() {
    let window = Group { kind: GroupKind::Window, block_tokens: 4, reach: 9, ..TWO };
    let (engine, _) = odd_with(vec![TWO, window], 1, &[]);
    // A prefix of 5 units has 10 blocks. The window needs only the last 3 blocks, starting with the
    // second block of a unit.
    assert_eq!(engine.loaded_blocks(0, 5), [0..10, 7..10]);
    assert_eq!(engine.loaded_blocks(3, 5), [6..10, 7..10]);
    assert_eq!(engine.loaded_blocks(4, 5), [8..10, 8..10]);
}

#[test]
fn each_ticket_reaches_the_store_once() {
    let (engine, calls) = odd(2, &[vec![row(5, 0), row(6, 1), row(7, 2)]]);
    let (saves, _) = reserve(&engine, 9, 0..3, &[4, 0, 7]).expect("in the table");
    assert_eq!(saves.tickets(), [1, 2], "a chunk with a null block must not be saved");
    assert_eq!(engine.settle(&[1, 2], &[], &[]), (0, 0));
    assert_eq!(engine.settle(&[1], &[2], &[]), (1, 1));
    assert_eq!(engine.settle(&[1, 2], &[2], &[]), (0, 0));
    engine.abort(&[1, 2, 3]);
    let every = calls.lock().expect("no panic");
    assert_eq!(*every, [("abort", vec![6]), ("abort", vec![7]), ("commit", vec![5])]);
}

/// Late reports for the first store must not settle saves with the same numbers in the new store.
#[test]
fn a_new_store_may_reuse_reservation_numbers() {
    let (engine, calls) = odd(1, &[vec![row(1, 0), row(2, 1)], vec![row(1, 0)], vec![row(2, 1)]]);
    let again = || reserve(&engine, 9, 0..2, &[4, 5]).expect("in the table").0;
    let (before, after, last) = (again(), again(), again());
    assert_eq!(engine.num_in_flight(), 4);
    assert_eq!(engine.settle(before.tickets(), &[], &[]), (0, 2));
    engine.abort(before.tickets());
    assert!(calls.lock().expect("no panic").is_empty(), "the new store has no such reservations");
    assert_eq!(engine.settle(after.tickets(), &[], &[]), (1, 0));
    engine.abort(last.tickets());
    assert_eq!(*calls.lock().expect("no panic"), [("commit", vec![1]), ("abort", vec![2])]);
    assert_eq!(engine.num_in_flight(), 0);
}

fn leased(frame: u32, tier: TierName) -> LeasedFrame {
    LeasedFrame { frame: FrameId(frame), key: ChunkKey([3; 32]), tier }
}

const ONE: &Group = &Group::ONLY;

#[test]
fn blocks_with_negative_numbers_are_not_copied() {
    let (engine, calls) = odd(1, &[vec![row(5, 0)]]);
    assert!(reserve(&engine, 9, 0..2, &[4, -1]).is_err());
    assert_eq!(*calls.lock().expect("no panic"), [("abort", vec![5])]);
    for table in [[-1, 4], [4, -1], [4, -2]] {
        let mut batch = ChunkBatch::default();
        assert!(batch.add_loads(0, &[leased(1, TierName::Host)], 0, ONE, &table, 0).is_err());
    }
}

#[test]
fn a_load_covers_the_chunks_within_the_table() {
    let chunks = [(1, TierName::Host), (2, TierName::Host), (3, TierName::Disk)]
        .map(|(frame, tier)| leased(frame, tier));
    let load = |first_unit, cut, table: &[i32], begin| {
        let mut batch = ChunkBatch::default();
        let (by_tier, num_filled) =
            batch.add_loads(0, &chunks, first_unit, cut, table, begin).expect("no negative block");
        assert_eq!(num_filled, batch.wanted_blocks().count());
        let chunk = |nth| {
            let Chunk { frame, first_block, blocks, .. } = batch.chunk(nth);
            (frame.0, first_block, blocks.to_vec())
        };
        ((0..batch.len()).map(chunk).collect::<Vec<_>>(), by_tier.host, by_tier.disk)
    };
    let two = |frame, blocks: [i32; 2]| (frame, 0, blocks.to_vec());
    assert_eq!(load(0, ONE, &[10, 11], 1), (vec![(2, 0, vec![10]), (3, 0, vec![11])], 1, 1));
    assert_eq!(
        load(5, ONE, &[10, 11, 12, 13], 4),
        (vec![(1, 0, vec![11]), (2, 0, vec![12]), (3, 0, vec![13])], 2, 1)
    );
    let halves = &Group { blocks_per_unit: 2, kept_blocks: 2, ..Group::ONLY };
    assert_eq!(
        load(1, halves, &[10, 11, 12, 13], 4),
        (vec![two(2, [10, 11]), two(3, [12, 13])], 1, 1)
    );
    assert_eq!(
        load(1, halves, &[11, 12, 13], 5),
        (vec![(2, 1, vec![11]), two(3, [12, 13])], 1, 1),
        "part of a chunk"
    );
    let last = &Group { blocks_per_unit: 2, ..Group::ONLY };
    assert_eq!(
        load(0, last, &[9, 10, 11, 12], 2),
        (vec![(2, 0, vec![10]), (3, 0, vec![12])], 1, 1),
        "the last block"
    );
    assert_eq!(load(u32::MAX, ONE, &[10], 0).0, vec![]);
}

#[test]
fn columns_become_a_batch_and_back() {
    let [keys, blocks] = [vec![0; 64], [7_i32, 8, -1, 8].map(i32::to_le_bytes).concat()];
    let frames = [1_u32, 2].map(u32::to_le_bytes).concat();
    let tickets = [1_u64, 2, 3].map(u64::to_le_bytes).concat();
    let two = |blocks| Columns { group: 4, frames: &frames[..], keys: &keys[..], blocks };
    let one = Columns { group: 1, frames: &frames[..4], keys: &keys[..32], blocks: &blocks[..4] };
    let batch = ChunkBatch::from_columns(&[two(&blocks), one.clone()], &tickets).expect("a batch");
    assert_eq!((batch.len(), batch.tickets()), (3, &[1, 2, 3][..]));
    let owned = |part: Columns<&[u8]>| Columns {
        group: part.group,
        frames: part.frames.to_vec(),
        keys: part.keys.to_vec(),
        blocks: part.blocks.to_vec(),
    };
    assert!(batch.columns().eq([owned(two(&blocks)), owned(one.clone())]));
    let of_each: Vec<_> =
        batch.by_group().into_iter().map(|(group, own)| (group, own.tickets().to_vec())).collect();
    assert_eq!(of_each, [(4, vec![1, 2]), (1, vec![3])]);
    assert_eq!(batch.take([2, 0]).columns().map(|part| part.group).collect::<Vec<_>>(), [1, 4]);
    assert!(
        ChunkBatch::from_columns(&[two(&blocks[..12])], &[]).is_err(),
        "chunks must have the same size"
    );
    assert!(ChunkBatch::from_columns(&[two(&[255; 16])], &[]).is_err(), "a chunk without blocks");
    assert!(
        ChunkBatch::from_columns(&[two(&blocks)], &tickets).is_err(),
        "there is one ticket too many"
    );
}

#[test]
fn blocks_of_a_save_are_in_use_until_it_is_settled() {
    let begin = || {
        let (engine, _) = odd_with(vec![TWO], 1, &[vec![row(1, 0), row(2, 1)]]);
        reserve(&engine, 9, 0..2, &[7, 8, 8, 9]).expect("in the table");
        engine
    };
    let engine = begin();
    engine.settle(&[2], &[], &[]);
    assert_eq!(
        engine.being_read(Some(&[9, 8, 7])),
        [8, 7],
        "the earlier save of the block waits longer"
    );
    let engine = begin();
    assert_eq!(engine.being_read(Some(&[9, 8, 7])), [9, 8, 7]);
    engine.settle(&[1], &[], &[]);
    assert_eq!(engine.being_read(Some(&[9, 8, 7])), [9, 8], "the other save also reads the block");
    engine.abort(&[1, 2]);
    assert!(engine.being_read(None).is_empty() && engine.num_in_flight() == 0);
}
