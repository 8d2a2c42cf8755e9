//! Examples of per-salt quotas and TTLs: which tenant a chunk belongs to, which chunks a quota
//! includes, and when a chunk was saved. `store_limits.rs` compares quotas and TTLs with a model.
#![expect(clippy::unwrap_used, reason = "tests")]

mod store_common;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvloft_core::evict::Eviction;
use kvloft_core::io::SizeClass;
use kvloft_core::key::SaltTag;
use kvloft_core::store::{Limits, Quota, SaveRequest, Store, StoreConfig, TenantLimits};
use kvloft_testing::memory_tier::MemoryTier;
use kvloft_testing::one_prefix::StoreExt;
use store_common::{MemoryDisk, arena_of, bytes, chain_of, config, disk_settings, save, stat};

const FRAMES: u32 = 32;
const SLOTS: u32 = 64;
const START_S: u64 = 1_700_000_000;

fn host_only(limits: TenantLimits) -> Store {
    Store::open(&StoreConfig { limits, ..config(FRAMES, Eviction::Lru) }).unwrap()
}

fn of_salts(host: Option<Quota>) -> TenantLimits {
    TenantLimits { salted: Limits { host, ..Limits::default() }, ..TenantLimits::default() }
}

/// Saves one chunk of the second size, and returns true if it got a frame.
fn save_large(store: &Store, salt: Option<&str>, prompt: u32) -> bool {
    let chain = chain_of(salt, prompt, 1);
    let asked = SaveRequest { class: SizeClass(1), ..((&chain).into(), 0..1).into() };
    let reserved = store.reserve_many(None, &[asked]).unwrap();
    store.commit(reserved.into_iter().flat_map(|each| each.chunks)) == 1
}

fn in_host(store: &Store, salt: Option<&str>, prompts: std::ops::Range<u32>, len: u32) -> Vec<u32> {
    prompts.map(|prompt| store.lookup(&chain_of(salt, prompt, len)).host_units).collect()
}

#[test]
fn a_tenant_at_its_quota_evicts_its_own_coldest_chunk() {
    let store = host_only(of_salts(Some(Quota::Share(250_000)))); // 8 frames
    let arena = arena_of(&store);
    for (salt, prompts) in [(Some("b"), 0..2), (None, 0..2), (Some("a"), 0..2)] {
        for prompt in prompts {
            save(&store, &arena, &chain_of(salt, prompt, 4), 0..4);
        }
    }
    drop(store.acquire(&chain_of(Some("a"), 0, 4))); // warmer than the other prompt
    assert_eq!(save(&store, &arena, &chain_of(Some("a"), 2, 3), 0..3), 3);
    assert_eq!(in_host(&store, Some("a"), 0..3, 4), [4, 1, 3]);
    assert_eq!(
        (in_host(&store, Some("b"), 0..2, 4), in_host(&store, None, 0..2, 4)),
        (vec![4, 4], vec![4, 4])
    );
    assert_eq!(
        [
            stat(&store, "quota_evictions"),
            stat(&store, "quota_dropped"),
            stat(&store, "frames_free")
        ],
        [3, 0, 8]
    );
    store.check().unwrap();
}

#[test]
fn a_prompt_longer_than_the_quota_keeps_its_beginning() {
    let store = host_only(of_salts(Some(bytes(5))));
    let chain = chain_of(Some("a"), 0, 9);
    assert_eq!(save(&store, &arena_of(&store), &chain, 0..9), 5);
    assert_eq!([stat(&store, "quota_dropped"), stat(&store, "reserve_dropped")], [4, 4]);
    assert_eq!(store.lookup(&chain).host_units, 5);
    let lease = store.acquire(&chain);
    assert_eq!(
        save(&store, &arena_of(&store), &chain_of(Some("a"), 1, 1), 0..1),
        0,
        "all chunks are in use (I4)"
    );
    drop(lease);
    assert_eq!(save(&store, &arena_of(&store), &chain_of(Some("a"), 1, 1), 0..1), 1);
    assert_eq!(in_host(&store, Some("a"), 0..2, 9), [4, 1]);
    store.check().unwrap();
}

#[test]
fn a_quota_of_zero_stores_nothing() {
    let store = host_only(TenantLimits {
        by_salt: vec![(SaltTag::of("a"), Limits { host: Some(bytes(0)), ..Limits::default() })],
        ..TenantLimits::default()
    });
    for (salt, num) in [(Some("a"), 0), (Some("b"), 4), (None, 4)] {
        assert_eq!(save(&store, &arena_of(&store), &chain_of(salt, 0, 4), 0..4), num);
    }
    assert_eq!(stat(&store, "salts"), 1);
}

/// Workers cannot copy to all frames yet. Chunks in frames beyond the limit stay, because evicting
/// them would free no frame that saves can use.
#[test]
fn a_save_at_its_quota_takes_frames_that_saves_can_use() {
    let store = host_only(of_salts(Some(bytes(8))));
    let arena = arena_of(&store);
    for (salt, prompt) in [(None, 0), (Some("a"), 0), (Some("a"), 1), (None, 1)] {
        save(&store, &arena, &chain_of(salt, prompt, 4), 0..4);
    }
    drop(store.acquire(&chain_of(Some("a"), 0, 4)));
    store.limit_memory(8 * 4096); // prompt 0 of each tenant
    assert_eq!(save(&store, &arena, &chain_of(Some("a"), 2, 1), 0..1), 1);
    assert_eq!(
        (in_host(&store, Some("a"), 0..3, 4), in_host(&store, None, 0..2, 4)),
        (vec![3, 4, 1], vec![4, 4])
    );
    store.check().unwrap();
}

#[test]
fn chunks_in_use_by_loads_count_for_the_quota() {
    let disk = MemoryDisk::new(SLOTS);
    let limits = of_salts(Some(bytes(6)));
    let config = StoreConfig {
        disk: Some(disk_settings(SLOTS.into(), 1)),
        limits,
        ..config(FRAMES, Eviction::Lru)
    };
    let store = disk.open(&config, &[]);
    for prompt in 0..2 {
        save(&store, &arena_of(&store), &chain_of(Some("a"), prompt, 5), 0..5);
        assert!(disk.flush(&store));
    }
    assert_eq!(in_host(&store, Some("a"), 0..2, 5), [1, 5]);
    let other = store.acquire(&chain_of(Some("a"), 1, 2));
    let lease = store.acquire(&chain_of(Some("a"), 0, 5));
    let deadline = Instant::now() + Duration::from_secs(60);
    while lease.poll().pending_units > 0 && Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert_eq!(lease.poll().ready_units, 4, "two of six are in use");
    assert_eq!(store.tenants(1).0[0].host_bytes, 6 * 4096);
    drop((lease, other));
    store.check().unwrap();
}

#[test]
fn the_clock_may_go_backwards() {
    let disk = MemoryDisk::new(SLOTS);
    let limits = TenantLimits {
        salted: Limits { ttl_s: Some(1000), ..Limits::default() },
        ..TenantLimits::default()
    };
    let config = |now_s| StoreConfig {
        disk: Some(disk_settings(SLOTS.into(), 1)),
        limits: limits.clone(),
        now_s,
        ..config(FRAMES, Eviction::Lru)
    };
    let store = disk.open(&config(START_S), &[]);
    save(&store, &arena_of(&store), &chain_of(Some("a"), 0, 5), 0..5);
    save(&store, &arena_of(&store), &chain_of(None, 0, 5), 0..5);
    assert!(disk.flush(&store));
    drop(store);
    for (now_s, of_a) in [(START_S - 30, 5), (START_S + 999, 5), (START_S - 5000, 0)] {
        let store = disk.open(&config(now_s - disk.now_s()), &disk.entries());
        assert_eq!(store.lookup(&chain_of(Some("a"), 0, 5)).stored_units, of_a, "{now_s}");
        assert_eq!(store.lookup(&chain_of(None, 0, 5)).stored_units, 5);
        store.sweep();
        assert!(disk.flush(&store));
    }
    assert_eq!(disk.chunks().len(), 5, "chunks of unknown age are removed from disk");
}

/// The copies found on disk are older than the chunks saved again before the disk opened. With the
/// newer save time, these copies would outlive their TTL.
#[test]
fn an_old_copy_on_disk_keeps_its_age() {
    let disk = MemoryDisk::new(SLOTS);
    let limits = TenantLimits {
        salted: Limits { ttl_s: Some(1000), ..Limits::default() },
        ..TenantLimits::default()
    };
    let open = |now_s| {
        let (disk_settings, limits) = (Some(disk_settings(SLOTS.into(), 1)), limits.clone());
        let config =
            StoreConfig { disk: disk_settings, limits, now_s, ..config(FRAMES, Eviction::Lru) };
        disk.open(&config, &disk.entries())
    };
    let chain = chain_of(Some("a"), 0, 5);
    let store = open(START_S);
    save(&store, &arena_of(&store), &chain, 0..5);
    assert!(disk.flush(&store));
    drop(store);
    disk.fail_opens.store(true, Ordering::SeqCst);
    let store = open(START_S + 900 - disk.now_s());
    save(&store, &arena_of(&store), &chain, 0..2);
    disk.fail_opens.store(false, Ordering::SeqCst);
    disk.wait(61);
    assert!(disk.flush(&store));
    assert_eq!(store.lookup(&chain).host_units, 2);
    disk.wait(200);
    store.sweep();
    assert!(disk.flush(&store));
    let now_s = START_S + 900 + 261;
    assert!(disk.chunks().values().all(|meta| meta.saved_s + 1000 > now_s), "{:?}", disk.chunks());
    assert_eq!(store.lookup(&chain).stored_units, 2);
    store.check().unwrap();
}

/// If the child outlived its parent, the expired parent would also remain visible.
#[test]
fn a_chunk_expires_with_its_older_parent() {
    let disk = MemoryDisk::new(SLOTS);
    let limits = TenantLimits {
        salted: Limits { ttl_s: Some(1000), ..Limits::default() },
        ..TenantLimits::default()
    };
    let config = StoreConfig {
        disk: Some(disk_settings(SLOTS.into(), 1)),
        limits,
        ..config(FRAMES, Eviction::Lru)
    };
    let store = disk.open(&config, &[]);
    let chain = chain_of(Some("a"), 0, 6);
    save(&store, &arena_of(&store), &chain, 0..3);
    disk.wait(900);
    save(&store, &arena_of(&store), &chain, 3..6);
    assert_eq!(store.lookup(&chain).host_units, 6);
    disk.wait(100);
    assert_eq!(store.lookup(&chain).stored_units, 0);
    store.sweep();
    assert!(disk.flush(&store), "a write in progress keeps its frame");
    assert_eq!(
        [stat(&store, "expired"), stat(&store, "entries"), stat(&store, "frames_visible")],
        [6, 0, 0]
    );
    assert_eq!(
        save(&store, &arena_of(&store), &chain, 0..6),
        6,
        "the prompt must be savable again"
    );
    store.check().unwrap();
}

/// A prompt longer than the disk quota must not evict its own beginning, so its end is not written.
#[test]
fn a_prompt_longer_than_the_disks_quota_keeps_its_beginning_there() {
    for (most, num) in [(0, 0), (3, 3)] {
        let disk = MemoryDisk::new(SLOTS);
        let limits = TenantLimits {
            salted: Limits { disk: Some(bytes(most)), ..Limits::default() },
            ..TenantLimits::default()
        };
        let config = StoreConfig {
            disk: Some(disk_settings(SLOTS.into(), 2)),
            limits,
            ..config(FRAMES, Eviction::Lru)
        };
        let store = disk.open(&config, &[]);
        for salt in [Some("a"), None] {
            assert_eq!(save(&store, &arena_of(&store), &chain_of(salt, 0, 6), 0..6), 6);
        }
        assert!(disk.flush(&store));
        assert_eq!(
            [stat(&store, "disk_used"), disk.chunks().len() as u64],
            [6 + num, 6 + num],
            "a quota of {most}"
        );
        assert_eq!(store.lookup(&chain_of(Some("a"), 0, 6)).host_units, 6, "memory has no quota");
        assert!(stat(&store, "quota_dropped") > 0);
        store.check().unwrap();
    }
}

fn of_sizes(num_pages: u64, limits: TenantLimits, large_pages: u64) -> StoreConfig {
    StoreConfig {
        frame_sizes: vec![4096, large_pages * 4096].into(),
        host_bytes: num_pages * 4096,
        limits,
        ..config(1, Eviction::Lru)
    }
}

/// The large chunk can use free memory, so its tenant must evict only what the quota requires.
#[test]
fn a_larger_chunk_evicts_no_more_of_its_tenant_than_it_needs() {
    let store = Store::open(&of_sizes(512, of_salts(Some(bytes(128))), 4)).unwrap();
    let arena = arena_of(&store);
    for prompt in 0..16 {
        assert_eq!(save(&store, &arena, &chain_of(Some("a"), prompt, 8), 0..8), 8);
    }
    assert!(save_large(&store, Some("a"), 100));
    assert_eq!([stat(&store, "quota_evictions"), stat(&store, "quota_dropped")], [4, 0]);
    store.check().unwrap();
}

/// No slab becomes empty when the tenant evicts its own chunks, and smaller chunks take the memory
/// again before the tenant saves the next large chunk.
#[test]
fn a_tenant_at_its_quota_gets_a_slab_for_another_size() {
    let store = Store::open(&of_sizes(512, of_salts(Some(bytes(256))), 4)).unwrap();
    let arena = arena_of(&store);
    for prompt in 0..32 {
        for salt in [Some("a"), Some("b")] {
            save(&store, &arena, &chain_of(salt, prompt, 8), 0..8);
        }
    }
    let mut num_saved = 0;
    for round in 1..20 {
        for nth in 0..10 {
            save(&store, &arena, &chain_of(Some("a"), 100 * round + nth, 8), 0..8);
        }
        num_saved += u32::from(save_large(&store, Some("a"), 100 * round + 50));
        assert!(store.tenants(2).0.iter().all(|tenant| tenant.host_bytes <= 256 * 4096));
    }
    assert!(num_saved >= 10, "{num_saved} of 19 large chunks were saved");
    store.check().unwrap();
}

#[test]
fn a_larger_chunk_evicts_as_many_chunks_of_its_tenant_from_disk_as_it_needs() {
    for (most, used, num_dropped) in [(16, 16 - 8 + 1, 0), (4, 4, 1)] {
        let disk = MemoryDisk::of(MemoryTier::with_sizes(&[4096, 8 * 4096], 64 * 4096));
        let limits = TenantLimits {
            salted: Limits { disk: Some(bytes(most)), ..Limits::default() },
            ..TenantLimits::default()
        };
        let config = StoreConfig { disk: Some(disk_settings(64, 1)), ..of_sizes(64, limits, 8) };
        let store = disk.open(&config, &[]);
        for prompt in 0..most {
            save(&store, &arena_of(&store), &chain_of(Some("a"), prompt, 1), 0..1);
        }
        assert!(disk.flush(&store));
        assert!(save_large(&store, Some("a"), 100));
        assert!(disk.flush(&store));
        assert_eq!(
            [stat(&store, "disk_used"), stat(&store, "quota_dropped")],
            [used, num_dropped],
            "a quota of {most}"
        );
        store.check().unwrap();
    }
}
