//! Tests multiple stores with different frame sizes on one arena: slabs move between stores, and no
//! store sees another store's bytes.
//!
//! The oracle records which bytes of the arena are reserved or pinned, and their expected content.
//! Frames in use never overlap frames of other stores and always hold the bytes that their owner
//! wrote.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvloft_core::evict::Eviction;
use kvloft_core::io::{FrameGrid, FrameId, FrameSizes, SizeClass};
use kvloft_core::key::{ChunkKey, KeyChain};
use kvloft_core::pool::Pool;
use kvloft_core::store::{
    DiskSettings, ReadLease, SaveRequest, SlabRelease, Store, StoreConfig, WriteLease,
};
use kvloft_core::tier::disk::DiskRoot;
use kvloft_testing::one_prefix::StoreExt;
use proptest::prelude::*;

const PAGE: u64 = 4096;
const FRAMES: [u64; 3] = [2 * PAGE, 3 * PAGE, PAGE];
/// Frame sizes of each store, in pages. The pool is sized for the first store. A slab has eight
/// pages, so frames of some sizes fill it and frames of other sizes leave space unused.
const SIZES: [[&[u64]; 3]; 7] = [
    [&[2], &[3], &[1]],
    [&[2], &[8], &[1]],
    [&[2], &[4], &[3]],
    [&[1], &[4], &[2]],
    [&[2], &[4], &[4]],
    [&[2], &[1, 4], &[3]],
    [&[2, 1], &[3, 8, 1], &[1, 2]],
];
const HOST: u64 = 98 * PAGE; // the last slab is longer

fn config(nth: usize, disk: Option<DiskSettings>) -> StoreConfig {
    StoreConfig {
        frame_sizes: FRAMES[nth].into(),
        host_bytes: 0,
        eviction: Eviction::Lru,
        available_bytes: None,
        namespace: [u8::try_from(nth).unwrap(); 32],
        disk,
        now_s: 0,
        limits: kvloft_core::store::TenantLimits::default(),
    }
}

fn pool() -> Arc<Pool> {
    Pool::create(DiskRoot::shared(), HOST, FRAMES[0], || {}).unwrap()
}

/// Returns the chain of a prompt. Prompts with adjacent numbers share their first tokens, so that
/// chains form trees.
fn chain(nth: usize, prompt: u32, len: u32) -> KeyChain {
    let mut chain = KeyChain::new(ChunkKey([u8::try_from(nth).unwrap(); 32]), 1).unwrap();
    chain
        .append_tokens(
            &(0..len).map(|at| if at < 2 { prompt / 4 } else { prompt }).collect::<Vec<_>>(),
        )
        .unwrap();
    chain
}

fn content(nth: usize, key: &ChunkKey, frame_bytes: u64) -> Vec<u8> {
    let mut unit = vec![u8::try_from(nth).unwrap(); 32];
    unit.extend(key.0);
    unit.repeat(usize::try_from(frame_bytes).unwrap() / unit.len())
}

#[derive(Debug)]
struct World {
    pool: Arc<Pool>,
    memory: File,
    frames: [FrameSizes; 3],
    shares: [Option<u32>; 3],
    stores: Vec<Store>,
    writing: Vec<(usize, WriteLease)>,
    reading: Vec<(usize, ReadLease)>,
}

impl World {
    fn new() -> Self {
        Self::of(FRAMES.map(FrameSizes::from), [None; 3])
    }

    fn of(frames: [FrameSizes; 3], shares: [Option<u32>; 3]) -> Self {
        let pool = Pool::create(DiskRoot::shared(), HOST, frames[0].largest(), || {}).unwrap();
        let open = |nth: usize| {
            Store::open_in(
                &StoreConfig { frame_sizes: frames[nth].clone(), ..config(nth, None) },
                &pool,
                shares[nth],
            )
            .unwrap()
        };
        let stores: Vec<_> = (0..3).map(open).collect();
        let memory = File::options().read(true).write(true).open(&stores[0].arena().path).unwrap();
        Self { pool, memory, frames, shares, stores, writing: Vec::new(), reading: Vec::new() }
    }

    fn open(&self, nth: usize) -> Store {
        let config = StoreConfig { frame_sizes: self.frames[nth].clone(), ..config(nth, None) };
        Store::open_in(&config, &self.pool, self.shares[nth]).unwrap()
    }

    /// Returns a store's frame layout for one size class.
    fn grid(&self, nth: usize, class: SizeClass) -> FrameGrid {
        FrameGrid::new(HOST, self.pool.slab_bytes(), self.frames[nth].bytes(class)).unwrap()
    }

    fn at(&self, nth: usize, frame: FrameId) -> (u64, u64) {
        let grid = self.grid(nth, frame.class());
        (grid.start(frame.number()), grid.frame_bytes)
    }

    fn has_one_size(&self, nth: usize) -> bool {
        self.frames[nth].all().len() == 1
    }

    /// Saves a whole prompt. The prompt's chunks cycle through the store's size classes.
    fn save(&mut self, nth: usize, chain: &KeyChain) -> u32 {
        let num_units = chain.num_blocks();
        let each = if self.has_one_size(nth) { num_units.max(1) } else { 1 };
        let classes: Vec<_> = self.frames[nth].classes().collect();
        let asked: Vec<_> = (0..num_units)
            .step_by(each as usize)
            .map(|unit| SaveRequest {
                prefix: chain.into(),
                units: unit..unit + each,
                class: classes[unit as usize % classes.len()],
                is_independent: false,
            })
            .collect();
        let reserved = self.stores[nth].reserve_many(None, &asked).unwrap();
        let num_dropped = reserved.iter().map(|each| each.num_dropped).sum();
        for lease in reserved.into_iter().flat_map(|each| each.chunks) {
            let row = *lease.reservation();
            let (start, len) = self.at(nth, row.frame);
            assert!(start + len <= self.pool.size_bytes());
            self.memory.write_all_at(&content(nth, &row.key, len), start).unwrap();
            self.writing.push((nth, lease));
        }
        num_dropped
    }

    fn commit_all(&mut self, nth: usize) {
        let (own, others) =
            std::mem::take(&mut self.writing).into_iter().partition(|(of, _)| *of == nth);
        self.writing = others;
        let own: Vec<_> = own;
        self.stores[nth].commit(own.into_iter().map(|(_, lease)| lease));
    }

    /// Returns the frames that a worker can access now, with their stores and keys.
    fn in_use(&self) -> Vec<(usize, FrameId, ChunkKey)> {
        let writing = self.writing.iter().map(|(nth, lease)| {
            let row = lease.reservation();
            (*nth, row.frame, row.key)
        });
        let reading = self.reading.iter().flat_map(|(nth, lease)| {
            lease.frames().into_iter().map(|row| (*nth, row.frame, row.key))
        });
        writing.chain(reading).collect()
    }

    fn check(&self) {
        let mut pages: BTreeMap<u64, (usize, FrameId)> = BTreeMap::new();
        for (nth, frame, key) in self.in_use() {
            let (start, len) = self.at(nth, frame);
            for page in start / PAGE..(start + len) / PAGE {
                let owner = *pages.entry(page).or_insert((nth, frame));
                assert_eq!(owner, (nth, frame), "two owners of page {page}");
            }
            let mut found = vec![0; usize::try_from(len).unwrap()];
            self.memory.read_exact_at(&mut found, start).unwrap();
            assert!(found == content(nth, &key, len), "{frame:?} of store {nth} has wrong bytes");
        }
        let num_slabs: u32 = self.stores.iter().map(|store| store.num_slabs().0).sum();
        assert!(num_slabs <= self.pool.num_slabs(), "{num_slabs} slabs");
        for store in &self.stores {
            store.check().unwrap();
        }
    }

    /// Runs one round of the thread that makes stores release slabs.
    fn release_slab(&self) -> BTreeSet<u8> {
        self.stores.iter().map(|store| store.release_slab() as u8).collect()
    }
}

#[derive(Debug, Clone)]
enum Step {
    Save(usize, u32, u32),
    Commit(usize),
    Abort(usize),
    Acquire(usize, u32),
    Release(usize),
    Discard(usize, u32, u32),
    Clear(usize),
    SetActive(usize, bool),
    GiveWay(usize),
    Reopen(usize),
    Limit(usize, u32),
}

fn step() -> impl Strategy<Value = Step> {
    let (nth, prompt) = (0..3_usize, 0..24_u32);
    prop_oneof![
        8 => (nth.clone(), prompt.clone(), 1..12_u32).prop_map(|(nth, prompt, len)| Step::Save(nth, prompt, len)),
        6 => nth.clone().prop_map(Step::Commit),
        1 => (0..64_usize).prop_map(Step::Abort),
        4 => (nth.clone(), prompt.clone()).prop_map(|(nth, prompt)| Step::Acquire(nth, prompt)),
        4 => (0..64_usize).prop_map(Step::Release),
        1 => (nth.clone(), prompt, 0..12_u32).prop_map(|(nth, prompt, at)| Step::Discard(nth, prompt, at)),
        1 => nth.clone().prop_map(Step::Clear),
        2 => (nth.clone(), any::<bool>()).prop_map(|(nth, is_active)| Step::SetActive(nth, is_active)),
        8 => nth.clone().prop_map(Step::GiveWay),
        1 => nth.clone().prop_map(Step::Reopen),
        1 => (nth, 0..100_u32).prop_map(|(nth, limit)| Step::Limit(nth, limit)),
    ]
}

fn take<T>(from: &mut Vec<T>, nth: usize) -> Option<T> {
    (!from.is_empty()).then(|| from.swap_remove(nth % from.len()))
}

fn apply(world: &mut World, step: &Step) {
    match *step {
        Step::Save(nth, prompt, len) => {
            world.save(nth, &chain(nth, prompt, len));
        }
        Step::Commit(nth) => world.commit_all(nth),
        Step::Abort(nth) => drop(take(&mut world.writing, nth)),
        Step::Acquire(nth, prompt) => {
            let lease = world.stores[nth].acquire(&chain(nth, prompt, 12));
            world.reading.push((nth, lease));
        }
        Step::Release(nth) => drop(take(&mut world.reading, nth)),
        Step::Discard(nth, prompt, at) => {
            world.stores[nth].discard(&[chain(nth, prompt, 12).keys()[at as usize]]);
        }
        Step::Clear(nth) => drop(world.stores[nth].clear()),
        Step::SetActive(nth, is_active) => world.stores[nth].set_active(is_active),
        Step::GiveWay(nth) => drop(world.stores[nth].release_slab()),
        Step::Reopen(nth) => world.stores[nth] = world.open(nth),
        Step::Limit(nth, pages) => world.stores[nth].limit_memory(u64::from(pages) * PAGE),
    }
}

/// Checks that once nothing is pinned, a store that keeps saving gets its share within a bounded
/// number of rounds.
fn gets_its_share(world: &mut World, nth: usize) {
    world.reading.clear();
    world.writing.clear();
    (0..3).for_each(|of| world.stores[of].set_active(of == nth));
    world.stores[nth].limit_memory(u64::MAX);
    let all = world.pool.num_slabs();
    for look in 0..u32::MAX {
        assert!(look < 40 * all, "{:?} slabs after {look} looks", world.stores[nth].num_slabs());
        let num_dropped = world.save(nth, &chain(nth, 1000 + look, 4));
        world.commit_all(nth);
        world.check();
        world.release_slab();
        if world.stores[nth].num_slabs().0 == all {
            assert!(num_dropped == 0 || !world.has_one_size(nth));
            return;
        }
    }
}

/// Like `gets_its_share`, but workers can copy only to the first `pages` pages, so the store must
/// get the frames in these pages.
fn gets_what_its_workers_can_copy_to(world: &mut World, nth: usize, pages: u32) {
    if !world.has_one_size(nth) {
        return; // one size may hold the slab that another size needs
    }
    world.reading.clear();
    world.writing.clear();
    (0..3).for_each(|of| world.stores[of].set_active(of == nth));
    let limit_bytes = u64::from(pages) * PAGE;
    world.stores[nth].limit_memory(limit_bytes);
    let grid = world.grid(nth, SizeClass(0));
    let is_within = |number: &u32| grid.is_within(*number, limit_bytes);
    let end = (0..grid.num_frames()).find(|number| !is_within(number));
    let num_frames = end.unwrap_or_else(|| grid.num_frames());
    for look in 0..40 * world.pool.num_slabs() {
        let num_dropped = world.save(nth, &chain(nth, 1000 + look, num_frames));
        world.check();
        world.commit_all(nth);
        world.release_slab();
        world.stores[nth].clear(); // the next save must reserve a frame for every chunk
        if num_dropped == 0 {
            return;
        }
    }
    panic!("store {nth} has {:?} slabs, not {num_frames} frames", world.stores[nth].num_slabs());
}

/// Checks that a cleared store keeps at most two slabs. A closed store keeps no slab, so that
/// another store can get every frame.
fn is_given_back(mut world: World, nth: usize) {
    for store in &world.stores {
        store.clear();
        assert!(store.num_slabs().0 <= 2, "a cleared store kept {:?} slabs", store.num_slabs());
    }
    world.stores.clear();
    let store = world.open(nth);
    let got = store.reserve(&chain(nth, 0, 98), 0..98).unwrap();
    let num_frames = world.grid(nth, SizeClass(0)).num_frames();
    assert_eq!(
        got.chunks.len(),
        98.min(num_frames as usize),
        "a single store must get every frame"
    );
    assert_eq!(store.num_slabs().0, world.pool.num_slabs().min(store.num_slabs().0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn stores_of_one_pool_never_touch_each_others_bytes(
        steps in prop::collection::vec(step(), 1..160),
        sizes in prop::sample::select(SIZES.to_vec()),
        percent in prop::option::of(5..60_u32),
        last in 0..3_usize,
        limit in 0..100_u32,
    ) {
        let mut shares = [None; 3];
        shares[(last + 2) % 3] = percent; // from a store whose share is not checked below
        let mut world = World::of(sizes.map(|pages| pages.iter().map(|num| num * PAGE).collect::<Vec<_>>().into()), shares);
        for step in &steps {
            apply(&mut world, step);
            world.check();
        }
        gets_what_its_workers_can_copy_to(&mut world, (last + 1) % 3, limit);
        gets_its_share(&mut world, last);
        is_given_back(world, last);
    }
}

#[test]
fn memory_follows_demand_up_to_equal_shares() {
    let mut world = World::new();
    let all = world.pool.num_slabs();
    for prompt in 0..40 {
        world.save(0, &chain(0, 8 * prompt, 4));
        world.commit_all(0);
    }
    assert_eq!(world.stores[0].num_slabs().0, all, "the only store that saves must get all memory");
    for prompt in 0..400 {
        world.save(1, &chain(1, 8 * prompt, 4));
        world.commit_all(1);
        world.release_slab();
        world.check();
    }
    assert_eq!(world.stores[1].num_slabs().0, all / 3, "the store must get exactly an equal share");
    assert_eq!(world.stores[0].num_slabs().0, all - all / 3);
    world.stores[0].set_active(false);
    for prompt in 400..800 {
        world.save(1, &chain(1, 8 * prompt, 4));
        world.commit_all(1);
        world.release_slab();
    }
    assert_eq!(
        world.stores[1].num_slabs().0,
        all / 2,
        "a store without engines must have no share"
    );
    world.stores[1].clear();
    assert!(world.stores[1].num_slabs().0 <= 1, "empty slabs must return to the pool");
}

#[test]
fn a_slab_with_a_pinned_or_reserved_frame_stays_until_it_is_free() {
    let mut world = World::new();
    for prompt in 0..40 {
        world.save(0, &chain(0, 8 * prompt, 4));
        world.commit_all(0);
        world.reading.push((0, world.stores[0].acquire(&chain(0, 8 * prompt, 4))));
    }
    let before = world.stores[0].num_slabs().0;
    world.stores[0].set_active(false);
    for prompt in 0..20 {
        assert!(world.save(1, &chain(1, prompt, 1)) == 1, "must be a miss, not a wait");
        assert_ne!(world.stores[0].release_slab(), SlabRelease::Released);
        world.check();
    }
    assert_eq!(world.stores[0].num_slabs().0, before);
    world.reading.clear();
    assert_eq!(world.stores[0].release_slab(), SlabRelease::Released);
    assert_eq!(world.save(1, &chain(1, 0, 1)), 0);
    world.check();
}

#[test]
fn a_store_is_asked_again_only_while_another_wants() {
    let news = Arc::new(AtomicU64::new(0));
    let heard = Arc::clone(&news);
    let pool = Pool::create(DiskRoot::shared(), HOST, FRAMES[0], move || {
        heard.fetch_add(1, Ordering::SeqCst);
    })
    .unwrap();
    let stores = [0, 1].map(|nth| Store::open_in(&config(nth, None), &pool, None).unwrap());
    let got = stores[0].reserve(&chain(0, 0, 60), 0..60).unwrap();
    stores[0].commit(got.chunks);
    assert_eq!(news.load(Ordering::SeqCst), 0);
    assert_eq!(stores[0].release_slab(), SlabRelease::NotNeeded);
    assert_eq!(stores[1].reserve(&chain(1, 0, 60), 0..60).unwrap().num_dropped, 60);
    assert!(pool.is_wanted() && news.load(Ordering::SeqCst) == 1);
    stores[1].set_active(false);
    assert!(!pool.is_wanted());
    assert_eq!(stores[0].release_slab(), SlabRelease::NotNeeded);
    stores[1].set_active(true);
    assert!(!pool.is_wanted(), "requests of former engines must not apply to later engines");
    assert_eq!(stores[1].reserve(&chain(1, 0, 60), 0..60).unwrap().num_dropped, 60);
    assert!(pool.is_wanted() && news.load(Ordering::SeqCst) == 2, "a new request must be reported");
}

#[test]
fn a_slab_that_was_given_up_is_not_taken_back_by_its_giver() {
    let mut world = World::new();
    for prompt in 0..40 {
        world.save(0, &chain(0, 8 * prompt, 4));
        world.commit_all(0);
    }
    let before = world.stores[0].num_slabs().0;
    assert_eq!(world.save(1, &chain(1, 0, 1)), 1);
    assert!((0..100).any(|_| world.stores[0].release_slab() == SlabRelease::Released));
    for prompt in 40..60 {
        world.save(0, &chain(0, 8 * prompt, 4)); // must evict its own chunks
        world.commit_all(0);
    }
    assert_eq!((world.stores[0].num_slabs().0, world.stores[1].num_slabs().0), (before - 1, 1));
    assert_eq!(world.save(1, &chain(1, 0, 1)), 0);
}

#[test]
fn saves_take_no_slab_that_workers_cannot_copy_to() {
    let mut world = World::new();
    world.stores[0].limit_memory(3 * FRAMES[0]);
    assert_eq!(world.save(0, &chain(0, 0, 6)), 3);
    assert_eq!(world.stores[0].num_slabs().0, 1);
}

#[test]
fn a_store_whose_share_shrank_wants_no_more() {
    let mut world = World::new();
    world.stores.pop();
    while world.stores[1].num_slabs().0 < 5 {
        world.save(1, &chain(1, 8 * u32::try_from(world.writing.len()).unwrap(), 1));
    }
    assert!(world.save(0, &chain(0, 0, 60)) > 0);
    assert_eq!((world.stores[0].num_slabs().0, world.stores[1].num_slabs().0), (7, 5));
    assert!(world.save(1, &chain(1, 8, 9)) > 0);
    assert!(world.pool.is_wanted(), "the store has 5 of its share of 6");
    world.stores.push(Store::open_in(&config(2, None), &world.pool, None).unwrap());
    assert!(!world.pool.is_wanted(), "the store may keep 4");
    assert_eq!(world.release_slab(), BTreeSet::from([SlabRelease::NotNeeded as u8]));
}

#[test]
fn frames_larger_than_a_slab_are_rejected() {
    let pool = pool();
    let error = Store::open_in(
        &StoreConfig { frame_sizes: (64 * PAGE).into(), ..config(0, None) },
        &pool,
        None,
    )
    .unwrap_err();
    assert!(error.to_string().contains("too large for this server's slabs"), "{error}");
}

#[test]
fn a_store_with_an_equal_share_of_what_is_left_has_a_slab_at_least() {
    let pool = Pool::create(DiskRoot::shared(), 8 * 4 * FRAMES[0], FRAMES[0], || {}).unwrap();
    assert_eq!(pool.num_slabs(), 8);
    let stores: Vec<_> = (0..9_u8)
        .map(|nth| {
            Store::open_in(&StoreConfig { namespace: [nth; 32], ..config(0, None) }, &pool, None)
                .unwrap()
        })
        .collect();
    let got = stores[0].reserve(&chain(0, 0, 60), 0..60).unwrap();
    stores[0].commit(got.chunks);
    for _ in 0..100 {
        let got = stores[1].reserve(&chain(0, 1, 1), 0..1).unwrap();
        if got.num_dropped == 0 {
            return;
        }
        stores[0].release_slab();
    }
    panic!("{:?} {:?}", stores[0].num_slabs(), stores[1].num_slabs());
}

#[test]
fn a_long_pinned_chain_is_visited_once_per_round() {
    let pool = Pool::create(DiskRoot::shared(), 16 << 20, PAGE, || {}).unwrap();
    let of =
        |nth: u8| StoreConfig { frame_sizes: PAGE.into(), namespace: [nth; 32], ..config(0, None) };
    let stores = [0, 1].map(|nth| Store::open_in(&of(nth), &pool, None).unwrap());
    let long = chain(0, 0, 4096);
    let got = stores[0].reserve(&long, 0..4096).unwrap();
    assert_eq!(stores[0].commit(got.chunks), 4096);
    let lease = stores[0].acquire(&long);
    assert_eq!(stores[1].reserve(&chain(1, 0, 1), 0..1).unwrap().num_dropped, 1);
    for _ in 0..3 {
        let num_calls =
            (0..1000).take_while(|_| stores[0].release_slab() == SlabRelease::InProgress).count();
        assert!((4..100).contains(&num_calls), "{num_calls} calls of 256 chunks each for 4096");
    }
    drop(lease);
    (0..100).for_each(|_| _ = stores[0].release_slab());
    assert_eq!(stores[1].reserve(&chain(1, 0, 1), 0..1).unwrap().num_dropped, 0);
}

/// A store with three frame sizes keeps moving its few slabs from size to size. The store must
/// still get slabs from other stores.
#[test]
fn sizes_that_share_few_slabs_get_more() {
    let sizes = SIZES[6].map(|pages| pages.iter().map(|num| num * PAGE).collect::<Vec<_>>().into());
    let mut world = World::of(sizes, [None; 3]);
    for (nth, prompt, len) in [(2, 12, 8), (2, 0, 10), (0, 0, 5), (0, 4, 5), (0, 8, 5)] {
        world.save(nth, &chain(nth, prompt, len));
    }
    world.stores[0].set_active(false);
    world.save(2, &chain(2, 4, 8));
    world.commit_all(2);
    world.commit_all(0);
    gets_its_share(&mut world, 1);
}
