//! Tests chunks of different sizes in one arena: the chunks fill most of the arena, and the memory
//! for each size adapts to the saved chunks.
#![expect(clippy::unwrap_used, clippy::cast_precision_loss, reason = "tests")]

mod store_common;

use kvloft_core::evict::Eviction;
use kvloft_core::io::SizeClass;
use kvloft_core::key::{ChunkKey, KeyChain};
use kvloft_core::pool::Pool;
use kvloft_core::store::{SaveRequest, Store, StoreConfig};
use kvloft_core::tier::disk::DiskRoot;
use kvloft_testing::one_prefix::StoreExt;
use store_common::{config, stat};

const PAGE: u64 = 4096;
const HOST: u64 = 4000 * PAGE;
/// Number of units in a prompt.
const LEN: u32 = 8;

fn chain(prompt: u32, group: u8) -> KeyChain {
    long_chain(prompt, group, LEN)
}

fn long_chain(prompt: u32, group: u8, len: u32) -> KeyChain {
    let mut chain = KeyChain::new(ChunkKey([group; 32]), 1).unwrap();
    chain.append_tokens(&vec![prompt; len as usize]).unwrap();
    chain
}

/// Saves a prompt with one chunk per unit in each group. `classes` lists the groups' size
/// classes. Returns the number of chunks that got no frame.
fn save(store: &Store, prompt: u32, classes: &[u8]) -> u32 {
    save_long(store, prompt, classes, LEN)
}

fn save_long(store: &Store, prompt: u32, classes: &[u8], len: u32) -> u32 {
    let groups = (1..).zip(classes);
    let chains: Vec<_> =
        groups.map(|(group, class)| (long_chain(prompt, group, len), *class)).collect();
    let asked: Vec<_> = chains
        .iter()
        .map(|(chain, class)| SaveRequest {
            class: SizeClass(*class),
            ..(chain.into(), 0..len).into()
        })
        .collect();
    let reserved = store.reserve_many(None, &asked).unwrap();
    let num_dropped = reserved.iter().map(|each| each.num_dropped).sum();
    store.commit(reserved.into_iter().flat_map(|each| each.chunks));
    if prompt.is_multiple_of(256) {
        store.check().unwrap();
    }
    num_dropped
}

fn open(pages: &[u64], namespace: u8) -> StoreConfig {
    let sizes: Vec<_> = pages.iter().map(|pages| pages * PAGE).collect();
    let common = config(1, Eviction::Lru);
    StoreConfig {
        frame_sizes: sizes.into(),
        host_bytes: HOST,
        namespace: [namespace; 32],
        ..common
    }
}

/// Saves prompts until chunks are evicted, and returns the fraction of `bytes` in use.
fn fill(store: &Store, classes: &[u8], bytes: u64) -> f64 {
    for prompt in 0.. {
        assert_eq!(save(store, prompt, classes), 0, "prompt {prompt}");
        if stat(store, "host_evictions") > 0 {
            break;
        }
    }
    stat(store, "host_used_bytes") as f64 / bytes as f64
}

/// Frame sizes in pages, and the size class of each group: first one full-attention group with five
/// sliding-window groups, then groups of very different sizes.
const SHAPES: [(&[u64], &[u8]); 3] =
    [(&[5, 5 * 6], &[1, 0, 0, 0, 0, 0]), (&[20, 2], &[0, 1]), (&[20, 13, 1], &[0, 1, 2])];

#[test]
fn chunks_of_several_sizes_fill_the_arena() {
    for (pages, classes) in SHAPES {
        let store = Store::open(&open(pages, 1)).unwrap();
        let used = fill(&store, classes, HOST);
        assert!(used >= 0.95, "{used} of the arena is used for {pages:?}");
        for prompt in 100_000..100_400 {
            assert_eq!(save(&store, prompt, classes), 0, "{pages:?}: prompt {prompt}");
        }
        let used = stat(&store, "host_used_bytes") as f64 / HOST as f64;
        assert!(used >= 0.92, "{used} of the arena is used after evictions for {pages:?}");
    }
}

/// A long prompt is saved and evicted group by group, so the chunks of each size form long runs.
#[test]
fn long_prompts_of_several_sizes_are_saved_whole() {
    for (pages, classes) in
        [(&[2, 1][..], &[0, 1][..]), (&[2, 1], &[1, 0, 0]), (&[3, 2, 1], &[0, 1, 2])]
    {
        let store = Store::open(&open(pages, 1)).unwrap();
        let num_dropped: Vec<_> =
            (0..40).map(|prompt| save_long(&store, prompt, classes, 300)).collect();
        assert_eq!(num_dropped[4..], [0; 36], "{pages:?}");
    }
}

/// The first chunks of a new size take a slab from an existing size, but evict few of its chunks.
#[test]
fn few_chunks_of_a_new_size_evict_few_others() {
    let store = Store::open(&open(&[1, 20], 1)).unwrap();
    fill(&store, &[0], HOST);
    let num_prompts = u32::try_from(HOST / PAGE).unwrap() / LEN;
    for nth in 0..num_prompts {
        // Every slab has chunks that were used long ago and chunks that were used recently.
        drop(store.acquire(&chain(nth * 37 % num_prompts, 1)));
    }
    let before = stat(&store, "host_evictions");
    for prompt in 0..40 {
        save_long(&store, 100_000 + prompt, &[1], 1);
    }
    let num_evicted = stat(&store, "host_evictions") - before;

    assert!(num_evicted <= 2000, "{num_evicted} of 4000 chunks were evicted");
    let num_found =
        (0..40).map(|prompt| store.lookup(&long_chain(100_000 + prompt, 1, 1)).host_units);
    assert!(num_found.sum::<u32>() >= 10);
}

/// No slab can be drained while every slab holds a pinned chunk, so evicting the other chunks is
/// useless.
#[test]
fn sizes_that_can_get_no_slab_evict_few_chunks() {
    let store = Store::open(&open(&[1, 20, 13], 1)).unwrap();
    fill(&store, &[0], HOST);
    let prompts = 0..u32::try_from(HOST / PAGE).unwrap() / LEN;
    let pinned: Vec<_> =
        prompts.step_by(5).map(|prompt| store.acquire(&chain(prompt, 1))).collect();
    let before = stat(&store, "host_evictions");
    for prompt in 100_000..100_030 {
        assert_eq!(save_long(&store, prompt, &[1, 2], 1), 2);
    }
    let num_evicted = stat(&store, "host_evictions") - before;

    assert!(num_evicted <= 1000, "{num_evicted} of 4000 chunks were evicted");
    drop(pinned);
    assert!((200_000..200_030).any(|prompt| save_long(&store, prompt, &[1, 2], 1) == 0));
}

/// A size that briefly ran out of frames must not take memory from another size once its own frames
/// are free again.
#[test]
fn a_shortage_that_is_over_evicts_no_chunks_of_other_sizes() {
    let store = Store::open(&open(&[1, 20], 1)).unwrap();
    let num_prompts = u32::try_from(HOST / PAGE).unwrap() / LEN;
    let leases: Vec<_> =
        (0..num_prompts).map(|prompt| store.reserve(&chain(prompt, 1), 0..LEN).unwrap()).collect();
    assert_eq!(save_long(&store, num_prompts, &[0], 1), 1);
    drop(leases);
    assert_eq!(save_long(&store, 100_000, &[1], 1), 0);
    assert_eq!(store.lookup(&long_chain(100_000, 1, 1)).host_units, 1);
}

#[test]
fn two_models_fill_their_shares_of_one_arena() {
    let host = 10 * HOST; // never written, so it takes no memory
    let pool = Pool::create(DiskRoot::shared(), host, 20 * PAGE, || {}).unwrap();
    let stores = [(&[20, 2][..], 1), (&[30, 5], 2)]
        .map(|(pages, nth)| Store::open_in(&open(pages, nth), &pool, None).unwrap());
    for prompt in 0..300 {
        save(&stores[0], prompt, &[0, 1]);
        save(&stores[1], prompt, &[0, 1, 1]);
        for store in &stores {
            store.release_slab();
        }
    }
    let used: u64 = stores.iter().map(|store| stat(store, "host_used_bytes")).sum();
    assert!(used as f64 >= 0.95 * host as f64, "{used} of {host}");
}

/// After a bounded number of saves of one size, chunks of this size occupy most of the memory.
#[test]
fn memory_follows_the_size_that_is_saved() {
    let store = Store::open(&open(&[20, 2], 1)).unwrap();
    for (round, class) in (1..).zip([1_u8, 0, 1, 0]) {
        let prompts = (0..).map(|nth| 100_000 * round + nth);
        let mut num_dropped = 0;
        for prompt in prompts.take(1500) {
            num_dropped += save(&store, prompt, &[class]);
        }
        let pages = [20, 2][usize::from(class)];
        let num_found = (0..1500_u32)
            .map(|nth| chain(100_000 * round + nth, 1))
            .map(|chain| u64::from(store.lookup(&chain).host_units))
            .sum::<u64>();
        let held = num_found * pages * PAGE;
        assert!(num_dropped <= 200, "{num_dropped} chunks of {pages} pages were dropped");
        assert!(
            held as f64 >= 0.85 * HOST as f64,
            "{held} bytes hold chunks of {pages} pages in round {round}"
        );
    }
}
