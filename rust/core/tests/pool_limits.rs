//! Tests that each store on an arena gets memory that it can use while workers can copy only to the
//! first part of the arena.
//!
//! Slabs have eight pages here, so a slab holds four frames of the first store or two of the
//! second.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;

use kvloft_core::evict::Eviction;
use kvloft_core::key::{ChunkKey, KeyChain};
use kvloft_core::pool::Pool;
use kvloft_core::store::{ReadLease, SlabRelease, Store, StoreConfig};
use kvloft_core::tier::disk::DiskRoot;
use kvloft_testing::one_prefix::StoreExt;

const PAGE: u64 = 4096;
const FRAMES: [u64; 3] = [2 * PAGE, 3 * PAGE, PAGE];
const NUM_SLABS: u32 = 12;
const SLAB: u64 = 8 * PAGE;

fn open(pool: &Arc<Pool>, nth: usize) -> Store {
    let config = StoreConfig {
        frame_sizes: FRAMES[nth].into(),
        host_bytes: 0,
        eviction: Eviction::Lru,
        available_bytes: None,
        namespace: [u8::try_from(nth).unwrap(); 32],
        disk: None,
        now_s: 0,
        limits: kvloft_core::store::TenantLimits::default(),
    };
    Store::open_in(&config, pool, None).unwrap()
}

fn stores<const N: usize>() -> (Arc<Pool>, [Store; N]) {
    let pool = Pool::create(DiskRoot::shared(), u64::from(NUM_SLABS) * 8 * PAGE, FRAMES[0], || {})
        .unwrap();
    let stores = std::array::from_fn(|nth| open(&pool, nth));
    assert_eq!(pool.num_slabs(), NUM_SLABS);
    (pool, stores)
}

fn chain(prompt: u32) -> KeyChain {
    let mut chain = KeyChain::new(ChunkKey([1; 32]), 1).unwrap();
    chain.append_tokens(&[prompt; 4]).unwrap();
    chain
}

/// Saves four chunks and returns the number of dropped saves.
fn save(store: &Store, prompt: u32) -> u32 {
    save_first(store, prompt, 4)
}

fn save_first(store: &Store, prompt: u32, stop: u32) -> u32 {
    let got = store.reserve(&chain(prompt), 0..stop).unwrap();
    store.commit(got.chunks);
    store.check().unwrap();
    got.num_dropped
}

/// Saves one prompt per slab.
fn fill(store: &Store, num_slabs: u32) {
    (0..num_slabs).for_each(|prompt| assert_eq!(save(store, prompt), 0));
    assert_eq!(num(store), num_slabs);
}

fn num(store: &Store) -> u32 {
    store.num_slabs().0
}

fn is_there(store: &Store, prompt: u32) -> bool {
    store.lookup(&chain(prompt)).host_units == 4
}

fn all_give_way(stores: &[Store]) {
    for store in stores {
        store.release_slab();
    }
}

/// Calls `release_slab` until a release completes. Returns true if the store released a slab.
fn gives(store: &Store) -> bool {
    (0..100).map(|_| store.release_slab()).find(|outcome| *outcome != SlabRelease::InProgress)
        == Some(SlabRelease::Released)
}

#[test]
fn a_store_gets_slabs_that_its_workers_can_copy_to() {
    let (pool, stores) = stores::<2>();
    (0..2).for_each(|nth| stores[nth].limit_memory(4 * SLAB));
    (0..60).for_each(|prompt| _ = save(&stores[0], prompt));
    assert_eq!(num(&stores[0]), 4);
    assert_eq!(save(&stores[1], 0), 4, "eight slabs are free, but none is usable");
    for prompt in 0..40 {
        save(&stores[1], prompt);
        all_give_way(&stores);
    }
    assert_eq!(
        [0, 1].map(|nth| num(&stores[nth])),
        [2, 2],
        "each store must get half of the slabs that both can use"
    );
    assert!(!pool.is_wanted());
    let share = |store: &Store| {
        store.stats().into_iter().find(|(name, _)| *name == "host_share_bytes").unwrap().1
    };
    assert_eq!([0, 1].map(|nth| share(&stores[nth])), [6 * SLAB; 2]);
}

#[test]
fn a_store_with_all_slabs_makes_room_for_one_with_few() {
    let (_pool, stores) = stores::<3>();
    fill(&stores[0], 3);
    (0..60).for_each(|prompt| _ = save(&stores[1], prompt));
    stores[2].limit_memory(2 * SLAB);
    assert_eq!(save(&stores[2], 0), 4);
    assert_eq!(
        stores[1].release_slab(),
        SlabRelease::NotNeeded,
        "none of the store's slabs is usable"
    );
    assert!(gives(&stores[0]), "the store must release a slab although it has less than its share");
    assert_eq!(save(&stores[2], 0), 0);
    for prompt in 10..30 {
        save(&stores[0], prompt);
        all_give_way(&stores);
    }
    assert_eq!([0, 1, 2].map(|nth| num(&stores[nth])), [4, 7, 1]);
    assert!(is_there(&stores[2], 0));
}

#[test]
fn a_slab_that_all_could_use_goes_to_who_can_use_few() {
    let (_pool, stores) = stores::<3>();
    fill(&stores[0], NUM_SLABS);
    (0..2).for_each(|prompt| drop(stores[0].acquire(&chain(prompt)))); // used last, in the two lowest slabs
    stores[2].limit_memory(2 * SLAB);
    assert_eq!([1, 2].map(|nth| save(&stores[nth], 0)), [4, 4]);
    assert!(gives(&stores[0]));
    assert_eq!([1, 2].map(|nth| save(&stores[nth], 0)), [4, 0]);
    assert!(gives(&stores[0]));
    assert!(
        is_there(&stores[0], 1) && !is_there(&stores[0], 2),
        "the least recently used slab must go to the store that can use all slabs"
    );
    assert_eq!(num(&stores[1]), 1);
}

#[test]
fn a_slab_that_cannot_be_used_is_not_given() {
    let (pool, [first, second, third]) = stores::<3>();
    fill(&first, 3);
    (0..60).for_each(|prompt| _ = save(&second, prompt));
    third.limit_memory(2 * SLAB);
    assert_eq!(save(&third, 0), 4);
    drop(second);
    assert!(num(&third) == 0 && pool.is_wanted());
    third.limit_memory(u64::MAX);
    assert_eq!(save(&third, 0), 0);
}

#[test]
fn what_saves_cannot_use_is_given_first() {
    let (_pool, stores) = stores::<2>();
    fill(&stores[0], NUM_SLABS);
    stores[0].limit_memory(2 * SLAB);
    while num(&stores[1]) < NUM_SLABS / 2 {
        save(&stores[1], 0);
        save(&stores[1], 100 + num(&stores[1]));
        assert!(num(&stores[0]) == 6 || gives(&stores[0]));
    }
    assert!(
        is_there(&stores[0], 0) && is_there(&stores[0], 1),
        "these slabs must stay although they are the least recently used"
    );
}

#[test]
fn a_pin_elsewhere_does_not_keep_the_slabs_that_can_be_used() {
    let (_pool, stores) = stores::<3>();
    fill(&stores[0], NUM_SLABS);
    let mut pinned: Vec<ReadLease> =
        (0..NUM_SLABS).map(|prompt| stores[0].acquire(&chain(prompt))).collect();
    for prompt in 4..8 {
        pinned[prompt] = stores[0].acquire(&chain(50)); // pins nothing
        let prompt = chain(u32::try_from(prompt).unwrap());
        stores[0].discard(&prompt.keys()[1..]);
        pinned.push(stores[0].acquire(&prompt)); // the emptiest slab, but pinned
    }
    assert_eq!(save(&stores[1], 0), 4);
    assert!(!gives(&stores[0]), "the store has tried four of its slabs");
    pinned.drain(..2);
    stores[2].limit_memory(2 * SLAB);
    assert_eq!(save(&stores[2], 0), 4);
    assert!(gives(&stores[0]));
    assert_eq!(save(&stores[2], 0), 0);
    pinned.clear();
    assert!(gives(&stores[0]));
    assert_eq!(num(&stores[1]), 1);
}

#[test]
fn who_can_use_more_than_before_waits_for_no_certain_slab() {
    let (_pool, stores) = stores::<2>();
    fill(&stores[0], NUM_SLABS);
    let _pinned = stores[0].acquire(&chain(0));
    stores[1].limit_memory(SLAB);
    assert_eq!(save(&stores[1], 0), 4);
    assert!(!gives(&stores[0]), "the only usable slab is still pinned");
    stores[1].limit_memory(u64::MAX);
    assert_eq!(save(&stores[1], 0), 4);
    assert!(gives(&stores[0]));
    assert_eq!(num(&stores[1]), 1);
}

#[test]
fn many_chunks_in_unusable_slabs_do_not_block_saves() {
    let (_pool, [_first, _second, store]) = stores::<3>();
    (0..96).for_each(|prompt| assert_eq!(save_first(&store, prompt, 1), 0));
    (0..16).for_each(|prompt| drop(store.acquire(&chain(prompt)))); // frames that saves can use were used last
    store.limit_memory(2 * SLAB);
    (100..120).for_each(|prompt| assert_eq!(save_first(&store, prompt, 1), 0));
    assert!((16..96).all(|prompt| store.lookup(&chain(prompt)).host_units == 1));
}
