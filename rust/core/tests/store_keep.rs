//! Keeping what hangs on the roots of a salt: it stays while there is pressure, and others go on.
#![expect(clippy::unwrap_used, reason = "tests")]

mod store_common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvloft_core::ErrorKind;
use kvloft_core::evict::Eviction;
use kvloft_core::key::{ChunkKey, KeyChain, SaltTag, root_key};
use kvloft_core::store::{Evict, Kept, Prefix, Store, StoreConfig, ToSave};
use proptest::prelude::*;
use store_common::{MemoryDisk, arena_of, config, disk_settings, range, save, stat};

const FRAMES: u32 = 32;
const SALTS: [Option<&str>; 3] = [None, Some("a"), Some("b")];

fn chain_of(salt: Option<&str>, prompt: u32, num_blocks: u32) -> KeyChain {
    let mut chain = KeyChain::new(root_key(&[7; 32], None, salt).unwrap(), 1).unwrap();
    chain.append_tokens(&(0..num_blocks).map(|at| prompt * 100 + at).collect::<Vec<_>>()).unwrap();
    chain
}

fn tag(salt: &str) -> SaltTag {
    SaltTag::of(salt)
}

/// Saves prompts of `len` blocks; none may be dropped.
fn fill(store: &Store, salt: Option<&str>, prompts: std::ops::Range<u32>, len: u32) {
    let arena = arena_of(store);
    let before = stat(store, "reserve_dropped");
    for prompt in prompts {
        save(store, &arena, &chain_of(salt, prompt, len), range(0, len, 0));
        store.check().unwrap();
    }
    assert_eq!(stat(store, "reserve_dropped"), before, "the cache goes on for all");
}

/// Blocks of all prompts in host, and in any tier.
fn found(store: &Store, salt: Option<&str>, prompts: std::ops::Range<u32>, len: u32) -> (u32, u32) {
    let all = prompts.map(|prompt| store.lookup(&chain_of(salt, prompt, len)));
    all.fold((0, 0), |(host, any), found| (host + found.host_blocks, any + found.stored_blocks))
}

#[test]
fn kept_chunks_outlast_others_until_they_are_not_kept() {
    for eviction in Eviction::ALL {
        let store = Store::open(&config(FRAMES, 1, eviction)).unwrap();
        fill(&store, Some("a"), 0..2, 5); // some are there before, some come later
        store.keep(tag("a"), true).unwrap();
        fill(&store, Some("a"), 2..3, 5);
        fill(&store, Some("b"), 0..3, 5);
        fill(&store, None, 0..60, 5);
        assert_eq!(found(&store, Some("a"), 0..3, 5).0, 15, "{eviction:?}");
        assert_eq!(found(&store, Some("b"), 0..3, 5).0, 0, "another tenant's leave");
        assert!(found(&store, None, 50..60, 5).0 >= 15, "half is for the others");
        assert_eq!(store.kept(), Kept { num_salts: 1, num_host: 15, num_disk: 0 });
        store.keep(tag("a"), false).unwrap();
        assert_eq!(store.kept(), Kept::default());
        fill(&store, None, 100..160, 5);
        assert_eq!(found(&store, Some("a"), 0..3, 5).0, 0, "{eviction:?}");
    }
}

#[test]
fn at_most_half_is_kept_and_the_last_used_of_it() {
    let store = Store::open(&config(FRAMES, 1, Eviction::Lru)).unwrap();
    for salt in ["a", "b"] {
        store.keep(tag(salt), true).unwrap();
    }
    fill(&store, Some("a"), 0..3, 5);
    fill(&store, Some("b"), 0..3, 5);
    fill(&store, None, 0..60, 5);
    let (one, other) = (found(&store, Some("a"), 0..3, 5).0, found(&store, Some("b"), 0..3, 5).0);
    assert_eq!((one + other, u64::from(one + other)), (16, store.kept().num_host));
    assert_eq!(found(&store, None, 57..60, 5).0, 15);
    store.keep_none();
    assert_eq!(store.kept(), Kept::default());
    fill(&store, None, 100..160, 5);
    assert_eq!(found(&store, Some("a"), 0..3, 5).0 + found(&store, Some("b"), 0..3, 5).0, 0);
}

#[test]
fn what_is_kept_stays_on_disk_too_until_the_store_ends() {
    let disk = MemoryDisk::new(FRAMES);
    let config = StoreConfig { disk: Some(disk_settings(FRAMES.into(), 1)), ..config(16, 1, Eviction::Lru) };
    let store = disk.open(&config, &[]);
    store.keep(tag("a"), true).unwrap();
    let fill = |store: &Store, salt, prompts: std::ops::Range<u32>, len| {
        for prompt in prompts {
            fill(store, salt, prompt..prompt + 1, len);
            assert!(disk.flush(store));
        }
    };
    fill(&store, Some("a"), 0..3, 5);
    fill(&store, None, 0..30, 5);
    assert_eq!(found(&store, Some("a"), 0..3, 5).1, 15, "more than host memory keeps");
    assert_eq!((store.kept().num_disk, found(&store, None, 28..30, 5).1), (15, 10));
    assert!(store.kept().num_host <= 8);
    fill(&store, Some("a"), 3..6, 5);
    fill(&store, None, 100..130, 5);
    assert_eq!(store.kept().num_disk, 16, "half of the disk at most");
    drop(store);
    let store = disk.open(&config, &disk.entries());
    assert_eq!(store.kept(), Kept::default());
    fill(&store, None, 200..230, 5);
    assert_eq!(found(&store, Some("a"), 0..6, 5).1, 0);
    assert!(disk.violations().is_empty());
}

#[test]
fn an_eviction_that_a_person_asks_for_takes_what_is_kept() {
    let store = Store::open(&config(FRAMES, 1, Eviction::Lru)).unwrap();
    store.keep(tag("a"), true).unwrap();
    fill(&store, Some("a"), 0..2, 5);
    let what = Evict { salt: Some(tag("a")), is_host_only: false };
    assert_eq!(store.evict(what, Instant::now() + Duration::from_secs(60)).num_chunks, 10);
    assert_eq!(store.kept(), Kept { num_salts: 1, ..Kept::default() }, "what comes later is kept again");
    store.check().unwrap();
}

#[test]
fn there_are_not_too_many_kept_salts() {
    let store = Store::open(&config(FRAMES, 1, Eviction::Lru)).unwrap();
    (0..1024).for_each(|nth| store.keep(tag(&format!("salt {nth}")), true).unwrap());
    store.keep(tag("salt 7"), true).unwrap();
    let error = store.keep(tag("one more"), true).unwrap_err();
    assert!(error.kind() == ErrorKind::InvalidConfig && error.to_string().contains("unpin some"), "{error}");
    store.keep(tag("salt 3"), false).unwrap();
    store.keep(tag("never kept"), false).unwrap();
    store.keep(tag("one more"), true).unwrap();
    store.check().unwrap();
}

/// More kept chunks in front than one call looks at: some saves find no frame, but not for long.
#[test]
fn a_long_row_of_kept_chunks_is_passed_in_parts() {
    let store = Store::open(&config(8192, 1, Eviction::Lru)).unwrap();
    store.keep(tag("a"), true).unwrap();
    let wide = |salt, seed: u32| {
        let mut chain = KeyChain::new(root_key(&[7; 32], None, salt).unwrap(), 1).unwrap();
        chain.append_tokens(&(seed * 4000..(seed + 1) * 4000).collect::<Vec<_>>()).unwrap();
        chain.attached(1, 0..4000).unwrap()
    };
    let keep = |(root, keys): &(ChunkKey, Vec<ChunkKey>), nth: std::ops::Range<usize>| {
        let keys = &keys[nth];
        let range = range(0, u32::try_from(keys.len()).unwrap(), 0);
        let asked = ToSave { prefix: Prefix::new(*root, keys), range, is_attached: true };
        let (leases, _) = store.reserve_many(None, &[asked]).unwrap();
        store.commit(leases)
    };
    let (own, others) = (wide(Some("a"), 0), [wide(None, 1), wide(None, 2), wide(None, 3)]);
    assert_eq!(keep(&own, 0..4000), 4000);
    assert_eq!(others[..1].iter().map(|other| keep(other, 0..4000)).sum::<u32>(), 4000);
    assert_eq!(keep(&others[1], 0..192), 192, "it is full, and the kept ones are in front");
    let num_tries = (192..4000).take_while(|nth| keep(&others[1], *nth..nth + 1) == 0).count();
    assert_eq!(num_tries, 3, "1024 at a time");
    for nth in 192..4000 {
        keep(&others[1], nth..nth + 1);
    }
    let in_host = |key: &ChunkKey| store.lookup(Prefix::new(own.0, std::slice::from_ref(key))).host_blocks;
    assert_eq!(own.1.iter().map(in_host).sum::<u32>(), 4000);
}

/// The same on disk: a write looks on until all that is kept is passed.
#[test]
fn no_write_is_dropped_for_a_long_row_of_kept_chunks() {
    let disk = MemoryDisk::new(6000);
    let config = StoreConfig { disk: Some(disk_settings(6000, 1)), ..config(64, 1, Eviction::Lru) };
    let store = disk.open(&config, &[]);
    store.keep(tag("a"), true).unwrap();
    let arena = arena_of(&store);
    let fill_disk = |salt, prompts: std::ops::Range<u32>| {
        for prompt in prompts {
            save(&store, &arena, &chain_of(salt, prompt, 1), range(0, 1, 0));
            assert!(prompt % 30 > 0 || disk.flush(&store));
        }
        assert!(disk.flush(&store));
    };
    fill_disk(Some("a"), 0..2700);
    fill_disk(None, 0..4000); // the last of them find it full, and what is kept in front
    assert_eq!((stat(&store, "disk_dropped"), store.kept().num_disk), (0, 2700));
}

/// A save that may use the lowest frames only passes many chunks, and does not take what is kept in those.
#[test]
fn kept_chunks_in_the_frames_of_saves_stay() {
    let store = Store::open(&config(256, 1, Eviction::Lru)).unwrap();
    store.keep(tag("a"), true).unwrap();
    fill(&store, Some("a"), 0..20, 1);
    for prompt in 0..236 {
        fill(&store, None, prompt..prompt + 1, 1);
    }
    for prompt in 0..20 {
        drop(store.acquire(&chain_of(None, prompt, 1))); // of frames below the limit, so that others are older
    }
    store.limit_frames(40);
    fill(&store, None, 500..540, 1);
    assert_eq!(found(&store, Some("a"), 0..20, 1).0, 20);
}

#[derive(Debug, Clone)]
enum Step {
    Save { salt: usize, prompt: u32, len: u32 },
    Keep { salt: usize, is_kept: bool },
    Load { salt: usize, prompt: u32 },
    Evict { salt: usize, is_host_only: bool },
}

fn step() -> impl Strategy<Value = Step> {
    let salted = 1..SALTS.len();
    prop_oneof![
        8 => (0..SALTS.len(), 0..12_u32, 1..6_u32).prop_map(|(salt, prompt, len)| Step::Save { salt, prompt, len }),
        2 => (salted.clone(), any::<bool>()).prop_map(|(salt, is_kept)| Step::Keep { salt, is_kept }),
        2 => (0..SALTS.len(), 0..12_u32).prop_map(|(salt, prompt)| Step::Load { salt, prompt }),
        1 => (salted, any::<bool>()).prop_map(|(salt, is_host_only)| Step::Evict { salt, is_host_only }),
    ]
}

/// Keys of a salt that are found in host, and in any tier.
fn keys_of(store: &Store, salt: usize) -> [BTreeSet<ChunkKey>; 2] {
    let mut found = [BTreeSet::new(), BTreeSet::new()];
    for chain in (0..12).map(|prompt| chain_of(SALTS[salt], prompt, 6)) {
        let lookup = store.lookup(&chain);
        found[0].extend(&chain.keys()[..lookup.host_blocks as usize]);
        found[1].extend(&chain.keys()[..lookup.stored_blocks as usize]);
    }
    found
}

fn run(disk: &Arc<MemoryDisk>, eviction: Eviction, steps: &[Step]) {
    let store = disk.open(&StoreConfig { disk: Some(disk_settings(48, 1)), ..config(FRAMES, 1, eviction) }, &[]);
    let mut kept = BTreeSet::new();
    for step in steps {
        let before: BTreeMap<_, _> = kept.iter().map(|salt| (*salt, keys_of(&store, *salt))).collect();
        let mut num_new = 0;
        let mut may_lose = None;
        match *step {
            Step::Save { salt, prompt, len } => {
                save(&store, &arena_of(&store), &chain_of(SALTS[salt], prompt, len), range(0, len, 0));
                num_new = u64::from(len);
            }
            Step::Keep { salt, is_kept } => {
                store.keep(tag(SALTS[salt].unwrap()), is_kept).unwrap();
                if is_kept {
                    kept.insert(salt)
                } else {
                    kept.remove(&salt)
                };
            }
            Step::Load { salt, prompt } => {
                drop(store.acquire(&chain_of(SALTS[salt], prompt, 6)));
                num_new = 6;
            }
            Step::Evict { salt, is_host_only } => {
                let what = Evict { salt: Some(tag(SALTS[salt].unwrap())), is_host_only };
                assert!(!store.evict(what, Instant::now() + Duration::from_secs(60)).is_cut_short);
                may_lose = Some(salt);
            }
        }
        assert!(disk.flush(&store));
        store.check().unwrap();
        let after: BTreeMap<_, _> = kept.iter().map(|salt| (*salt, keys_of(&store, *salt))).collect();
        let sum = |of: &BTreeMap<usize, [BTreeSet<_>; 2]>, tier: usize| -> usize {
            of.values().map(|found| found[tier].len()).sum()
        };
        let num = |tier: usize| sum(&before, tier).max(sum(&after, tier)) as u64;
        for (salt, before) in before.iter().filter(|(salt, _)| kept.contains(*salt)) {
            let after = &after[salt];
            for (tier, capacity) in [(0, FRAMES), (1, 32)] {
                let is_sure = 2 * (num(tier) + num_new) <= u64::from(capacity) && may_lose != Some(*salt);
                assert!(!is_sure || before[tier].is_subset(&after[tier]), "{step:?} took what is kept of {salt}");
            }
        }
        assert_eq!(store.kept().num_salts, kept.len() as u64);
        assert_eq!(stat(&store, "reserve_dropped"), 0, "others go on");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]
    #[test]
    fn nothing_that_is_kept_leaves_while_there_is_room_for_it(
        steps in prop::collection::vec(step(), 1..60), is_adaptive: bool,
    ) {
        let disk = MemoryDisk::new(48);
        run(&disk, if is_adaptive { Eviction::Adaptive } else { Eviction::Lru }, &steps);
        prop_assert!(disk.violations().is_empty());
    }
}
