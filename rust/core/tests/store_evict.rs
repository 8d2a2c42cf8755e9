//! Compares evictions of a salt's chunks with a model made of sets of keys.
//!
//! Frames and slots are plentiful, so each result is deterministic and must equal the model's.
#![expect(clippy::unwrap_used, reason = "tests")]

mod store_common;

use kvloft_core::io::SizeClass;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvloft_core::evict::Eviction;
use kvloft_core::io::Arena;
use kvloft_core::key::{ChunkKey, KeyChain, SaltTag, root_key};
use kvloft_core::pool::Pool;
use kvloft_core::store::{
    DiskSettings, Evict, Evicted, Prefix, ReadLease, SaveRequest, Store, StoreConfig, TenantLimits,
    remove_closed, remove_expired,
};
use kvloft_core::tier::disk::{DiskRoot, RemovedChunks, inspect};
use kvloft_testing::one_prefix::StoreExt;
use proptest::prelude::*;
use store_common::{FRAME, MemoryDisk, arena_of, config, disk_settings, fill, save, verify};

const LONG: Duration = Duration::from_secs(60);
const SALTS: [&str; 2] = ["tenant a", "tenant b"];
/// Name and path of an adapter.
type Adapter = Option<(&'static str, &'static str)>;
/// Adapter and salt of each root.
const ROOTS: [(Adapter, Option<&str>); 5] = [
    (None, None),
    (None, Some(SALTS[0])),
    (Some(("lora", "/there")), Some(SALTS[0])),
    (Some(("lora", "/there")), None),
    (None, Some(SALTS[1])),
];
const NUM_PROMPTS: u32 = 8;

fn chain_of(root: usize, prompt: u32) -> KeyChain {
    let (adapter, salt) = ROOTS[root];
    let mut chain = KeyChain::new(root_key(&[7; 32], adapter, salt).unwrap(), 1).unwrap();
    // Prompts form a tree with two branches at each of two levels, and have one of two lengths.
    let tokens = [9, 9, prompt & 1, prompt & 1, prompt & 2, prompt & 2];
    chain.append_tokens(&tokens[..if prompt & 4 == 0 { 6 } else { 4 }]).unwrap();
    chain
}

fn of_salt(salt: Option<usize>, is_host_only: bool) -> Evict {
    Evict { salt: salt.map(|nth| SaltTag::of(SALTS[nth])), is_host_only }
}

fn soon() -> Instant {
    Instant::now() + LONG
}

/// A number that distinguishes a chunk from later chunks with the same key.
type Life = u64;

#[derive(Debug, Default)]
struct Model {
    /// The root of every chunk ever saved, by key.
    roots: BTreeMap<ChunkKey, usize>,
    /// Parent of each chunk, by key.
    parents: BTreeMap<ChunkKey, ChunkKey>,
    host: BTreeMap<ChunkKey, Life>,
    disk: BTreeMap<ChunkKey, Life>,
    num_lives: Life,
}

impl Model {
    fn lookup(&self, keys: &[ChunkKey]) -> (u32, u32) {
        let leading = |holds: &dyn Fn(&ChunkKey) -> bool| {
            u32::try_from(keys.iter().take_while(|key| holds(key)).count()).unwrap()
        };
        let host = leading(&|key| self.host.contains_key(key));
        (host, leading(&|key| self.host.contains_key(key) || self.disk.contains_key(key)))
    }

    fn save(&mut self, root: usize, keys: &[ChunkKey], is_independent: bool) {
        if !is_independent {
            self.parents.extend(keys.windows(2).map(|pair| (pair[1], pair[0])));
        }
        for key in keys {
            self.num_lives += 1;
            let life = self.host.get(key).or(self.disk.get(key)).copied().unwrap_or(self.num_lives);
            self.host.insert(*key, life);
            self.disk.insert(*key, life);
            self.roots.insert(*key, root);
        }
    }

    fn is_of(&self, key: &ChunkKey, salt: Option<usize>) -> bool {
        salt.is_none_or(|nth| ROOTS[self.roots[key]].1 == Some(SALTS[nth]))
    }

    /// Evicts chunks from the model while leases hold `held`, and returns the expected report.
    fn evict(
        &mut self,
        salt: Option<usize>,
        is_host_only: bool,
        held: &BTreeSet<(ChunkKey, Life)>,
    ) -> Evicted {
        let theirs = |place: &BTreeMap<ChunkKey, Life>| -> BTreeSet<(ChunkKey, Life)> {
            place
                .iter()
                .filter(|(key, _)| self.is_of(key, salt))
                .map(|(key, life)| (*key, *life))
                .collect()
        };
        let (host, disk) = (theirs(&self.host), theirs(&self.disk));
        let num = |set: usize| set as u64;
        if is_host_only {
            let gone: Vec<_> = host.difference(held).copied().collect();
            self.host.retain(|key, life| !gone.contains(&(*key, *life)));
            let num_in_use = num(host.intersection(held).count());
            return Evicted {
                num_chunks: num(gone.len()),
                host_bytes: num(gone.len()) * FRAME as u64,
                num_in_use,
                ..Evicted::default()
            };
        }
        self.host.retain(|key, life| !host.contains(&(*key, *life)));
        self.disk.retain(|key, life| !disk.contains(&(*key, *life)));
        let all: BTreeSet<_> = host.union(&disk).copied().collect();
        let num_in_use = num(all.intersection(held).count());
        let [host_bytes, disk_bytes] = [host.len(), disk.len()].map(|len| num(len) * FRAME as u64);
        Evicted {
            num_chunks: num(all.len()),
            host_bytes,
            disk_bytes,
            num_in_use,
            is_cut_short: false,
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Save { root: usize, prompt: u32 },
    Attach { root: usize, prompt: u32 },
    Hold { root: usize, prompt: u32 },
    Release,
    Evict { salt: Option<usize>, is_host_only: bool },
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    let place = || (0..ROOTS.len(), 0..NUM_PROMPTS);
    let salt = prop_oneof![1 => Just(None), 4 => (0..SALTS.len()).prop_map(Some)];
    prop_oneof![
        6 => place().prop_map(|(root, prompt)| Step::Save { root, prompt }),
        2 => place().prop_map(|(root, prompt)| Step::Attach { root, prompt }),
        2 => place().prop_map(|(root, prompt)| Step::Hold { root, prompt }),
        1 => Just(Step::Release),
        3 => (salt, any::<bool>()).prop_map(|(salt, is_host_only)| Step::Evict { salt, is_host_only }),
        1 => Just(Step::Restart),
    ]
}

struct World {
    disk: Arc<MemoryDisk>,
    store: Option<Store>,
    arena: Arena,
    model: Model,
    leases: Vec<(ReadLease, Vec<(ChunkKey, Life)>)>,
}

impl World {
    fn config() -> StoreConfig {
        StoreConfig { disk: Some(disk_settings(1024, 1)), ..config(1024, Eviction::Lru) }
    }

    fn new() -> Self {
        let disk = MemoryDisk::new(1024);
        let store = disk.open(&Self::config(), &[]);
        Self {
            arena: arena_of(&store),
            disk,
            store: Some(store),
            model: Model::default(),
            leases: Vec::new(),
        }
    }

    fn store(&self) -> &Store {
        self.store.as_ref().unwrap()
    }

    fn apply(&mut self, step: &Step) {
        match *step {
            Step::Save { root, prompt } => {
                let chain = chain_of(root, prompt);
                save(self.store(), &self.arena, &chain, 0..chain.num_blocks());
                self.model.save(root, chain.keys(), false);
            }
            Step::Attach { root, prompt } => self.attach(root, prompt),
            Step::Hold { root, prompt } => self.hold(&chain_of(root, prompt)),
            Step::Release => self.leases.clear(),
            Step::Evict { salt, is_host_only } => self.evict(salt, is_host_only),
            Step::Restart => {
                self.leases.clear();
                self.store = None;
                self.store = Some(self.disk.open(&Self::config(), &self.disk.entries()));
                self.arena = arena_of(self.store());
                self.model.host.clear();
            }
        }
        assert!(self.disk.flush(self.store()));
    }

    /// Adds chunks of a sliding-window group. Their parent is the group's root.
    fn attach(&mut self, root: usize, prompt: u32) {
        let chain = chain_of(root, prompt);
        let (group_root, keys) = chain.independent_keys(3, 0..chain.num_blocks()).unwrap();
        let prefix = Prefix::new(group_root, &keys);
        let asked = SaveRequest {
            prefix,
            units: 0..chain.num_blocks(),
            class: SizeClass(0),
            is_independent: true,
        };
        let leases = self.store().reserve_many(None, &[asked]).unwrap().remove(0).chunks;
        for lease in &leases {
            fill(&self.arena, lease.reservation());
        }
        self.store().commit(leases);
        self.model.save(root, &keys, true);
    }

    fn hold(&mut self, chain: &KeyChain) {
        let lease = self.store().acquire(chain);
        let deadline = soon();
        while lease.poll().pending_units > 0 {
            assert!(Instant::now() < deadline, "the chunk is never read");
            std::thread::yield_now();
        }
        let found = &chain.keys()[..self.model.lookup(chain.keys()).1 as usize];
        let lives = found.iter().map(|key| {
            (*key, self.model.host.get(key).or(self.model.disk.get(key)).copied().unwrap())
        });
        let held: Vec<_> = lives.collect();
        self.model.host.extend(held.iter().copied());
        self.leases.push((lease, held));
    }

    fn evict(&mut self, salt: Option<usize>, is_host_only: bool) {
        let held = self.leases.iter().flat_map(|(_, held)| held).copied().collect();
        let said = self.store().evict(of_salt(salt, is_host_only), soon());
        assert_eq!(said, self.model.evict(salt, is_host_only, &held));
    }

    fn compare(&self) {
        self.store().check().unwrap();
        for root in 0..ROOTS.len() {
            for chain in (0..NUM_PROMPTS).map(|prompt| chain_of(root, prompt)) {
                let found = self.store().lookup(&chain);
                assert_eq!((found.host_units, found.stored_units), self.model.lookup(chain.keys()));
                let (group_root, keys) = chain.independent_keys(3, 0..chain.num_blocks()).unwrap();
                for key in &keys {
                    let found =
                        self.store().lookup(Prefix::new(group_root, std::slice::from_ref(key)));
                    assert_eq!(
                        (found.host_units, found.stored_units),
                        self.model.lookup(&[*key]),
                        "attached"
                    );
                }
            }
        }
        let on_disk: BTreeSet<_> = self.disk.chunks().into_keys().collect();
        assert_eq!(on_disk, self.model.disk.keys().copied().collect());
        for (lease, held) in &self.leases {
            let frames = lease.frames();
            assert!(
                frames.iter().map(|frame| frame.key).eq(held.iter().map(|(key, _)| *key)),
                "leases must stay valid"
            );
            assert!(
                frames.iter().all(|frame| verify(&self.arena, frame.frame, frame.key).is_none())
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    #[test]
    fn evict_removes_exactly_the_trees_of_the_salt(steps in prop::collection::vec(step(), 1..40)) {
        let mut world = World::new();
        for step in &steps {
            world.apply(step);
            world.compare();
        }
        prop_assert!(world.disk.violations().is_empty());
    }
}

/// Saves more chunks without parents than one slice of the walk visits, and a prefix that is too
/// long to be evicted in one call.
#[test]
fn many_chunks_are_evicted_in_slices() {
    let store = Store::open(&config(8192, Eviction::Lru)).unwrap();
    let arena = arena_of(&store);
    let deep = |salt| {
        let mut chain = KeyChain::new(root_key(&[7; 32], None, Some(salt)).unwrap(), 1).unwrap();
        chain.append_tokens(&(0..2000).collect::<Vec<_>>()).unwrap();
        chain
    };
    for is_host_only in [true, false] {
        for salt in SALTS {
            save(&store, &arena, &deep(salt), 0..2000);
            let wide = deep(salt);
            let (root, keys) = wide.independent_keys(1, 0..1800).unwrap();
            let asked = SaveRequest {
                prefix: Prefix::new(root, &keys),
                units: 0..1800,
                class: SizeClass(0),
                is_independent: true,
            };
            let leases = store.reserve_many(None, &[asked]).unwrap().remove(0).chunks;
            store.commit(leases);
        }
        // Evict the second salt's chunks, so that the walk also passes the first salt's chunks.
        let said = store.evict(of_salt(Some(1), is_host_only), soon());
        assert_eq!(
            (said.num_chunks, said.host_bytes / FRAME as u64, said.num_in_use, said.is_cut_short),
            (3800, 3800, 0, false)
        );
        assert_eq!(store.lookup(&deep(SALTS[1])).stored_units, 0);
        assert_eq!(
            store.lookup(&deep(SALTS[0])).stored_units,
            2000,
            "chunks of another tenant must stay"
        );
    }
}

/// The walk reaches the chunk first from its child and then directly, because its entry comes after
/// its child's entry.
#[test]
fn a_chunk_in_use_counts_once() {
    let store = Store::open(&config(16, Eviction::Lru)).unwrap();
    let chain = |salt, num_blocks: u32| {
        let mut chain = KeyChain::new(root_key(&[7; 32], None, Some(salt)).unwrap(), 1).unwrap();
        chain.append_tokens(&(0..num_blocks).collect::<Vec<_>>()).unwrap();
        chain
    };
    let save = |salt, num: u32| save(&store, &arena_of(&store), &chain(salt, num), 0..num);
    assert_eq!((save(SALTS[0], 6), save(SALTS[1], 6)), (6, 6));
    for nth in [0, 1] {
        // The second salt's entries are reused first.
        store.evict(of_salt(Some(nth), false), soon());
    }
    assert_eq!(save(SALTS[0], 12), 12);
    let lease = store.acquire(&chain(SALTS[0], 6));
    let said = store.evict(of_salt(Some(0), true), soon());
    assert_eq!((said.num_chunks, said.num_in_use, lease.frames().len()), (6, 6, 6));
}

/// A chunk that a worker is filling during the eviction does not become visible.
#[test]
fn a_save_in_flight_is_dropped() {
    let store = Store::open(&config(16, Eviction::Lru)).unwrap();
    let chain = chain_of(1, 0);
    let reserved = store.reserve(&chain, 0..3).unwrap();
    assert_eq!(store.evict(of_salt(Some(0), false), soon()).num_in_use, 3);
    assert_eq!(store.commit(reserved.chunks), 0);
    assert_eq!(store.lookup(&chain).stored_units, 0);
    store.check().unwrap();
}

#[test]
fn a_clear_ends_after_the_write_in_flight_is_undone() {
    let disk = MemoryDisk::new(64);
    let store = disk
        .open(&StoreConfig { disk: Some(disk_settings(64, 1)), ..config(64, Eviction::Lru) }, &[]);
    let chain = chain_of(1, 0);
    let gate = disk.write_gate.lock().unwrap();
    save(&store, &arena_of(&store), &chain, 0..1);
    let deadline = soon();
    while store.stats().iter().all(|(name, value)| *name != "pins" || *value > 0)
        || disk.num_slots_used() == 0
    {
        assert!(Instant::now() < deadline, "the chunk is never written");
        std::thread::yield_now();
    }
    let said = store.evict(of_salt(Some(0), true), soon());
    assert_eq!(
        (said.num_chunks, said.num_in_use),
        (0, 1),
        "chunks being written to disk must stay in memory"
    );
    assert!(
        store
            .evict(of_salt(Some(0), false), Instant::now() + Duration::from_millis(200))
            .is_cut_short
    );
    drop(gate);
    assert!(!store.evict(of_salt(Some(0), false), soon()).is_cut_short);
    assert!(disk.chunks().is_empty(), "a restart would find the chunk");
}

#[test]
fn a_disk_that_does_not_answer_is_reported() {
    let disk = MemoryDisk::new(64);
    let store = disk
        .open(&StoreConfig { disk: Some(disk_settings(64, 1)), ..config(64, Eviction::Lru) }, &[]);
    save(&store, &arena_of(&store), &chain_of(1, 0), 0..6);
    assert!(disk.flush(&store));
    disk.fail_frees.store(true, std::sync::atomic::Ordering::SeqCst);
    assert!(store.evict(of_salt(Some(0), false), soon()).is_cut_short);
    assert_eq!(store.lookup(&chain_of(1, 0)).stored_units, 0);
    disk.fail_frees.store(false, std::sync::atomic::Ordering::SeqCst);
    disk.wait(61);
    assert!(
        !store.evict(of_salt(Some(0), false), soon()).is_cut_short,
        "the eviction must be retried"
    );
    assert!(disk.chunks().is_empty());
}

#[test]
fn a_disk_that_is_opened_later_is_reported() {
    let disk = MemoryDisk::new(64);
    let config = StoreConfig { disk: Some(disk_settings(64, 1)), ..config(64, Eviction::Lru) };
    let store = disk.open(&config, &[]);
    save(&store, &arena_of(&store), &chain_of(1, 0), 0..6);
    assert!(disk.flush(&store));
    drop(store);
    disk.fail_opens.store(true, std::sync::atomic::Ordering::SeqCst);
    let store = disk.open(&config, &disk.entries());
    let evict = || store.evict(of_salt(Some(0), false), soon());
    assert_eq!(evict(), Evicted { is_cut_short: true, ..Evicted::default() });
    // The tier may open before the walk ends or while the walk waits for the disk. In both cases,
    // the walk does not visit the tier's chunks.
    disk.fail_opens.store(false, std::sync::atomic::Ordering::SeqCst);
    disk.wait(1);
    let deadline = soon();
    while evict().is_cut_short {
        assert!(Instant::now() < deadline, "the tier is never opened");
        disk.wait(1);
    }
    assert!(disk.chunks().is_empty(), "the report said that nothing was left");
}

#[test]
fn namespaces_that_no_store_has_open_lose_chunks_on_disk() {
    let dir = tempfile::tempdir().unwrap();
    let settings =
        DiskSettings { dir: dir.path().join("disk"), cap_bytes: 1 << 20, ..disk_settings(64, 1) };
    let over = |root: &Arc<DiskRoot>| {
        Pool::create(Arc::clone(root), 64 * FRAME as u64, FRAME as u64, || {}).unwrap()
    };
    let (pool, none) = (|| over(&DiskRoot::shared()), DiskRoot::shared());
    let open = |nth: u8, pool: &Arc<Pool>| {
        let config = StoreConfig {
            disk: Some(settings.clone()),
            namespace: [nth; 32],
            ..config(64, Eviction::Lru)
        };
        Store::open_in(&config, pool, None).unwrap()
    };
    let tag = SaltTag::of(SALTS[0]);
    let remove = |root: &Arc<DiskRoot>, namespace: &str| {
        remove_closed(&settings, root, namespace, Some(tag)).unwrap()
    };
    assert_eq!(remove(&none, ""), RemovedChunks::default(), "no directory");
    for nth in [1, 2] {
        let store = open(nth, &pool());
        for root in 0..ROOTS.len() {
            let chain = chain_of(root, 0);
            save(&store, &arena_of(&store), &chain, 0..chain.num_blocks());
        }
        assert!(store.flush(LONG));
    }
    let chunks =
        || inspect(&settings.dir).unwrap().iter().map(|space| space.chunks).collect::<Vec<_>>();
    assert_eq!(chunks(), [30, 30]);
    let removed = |num_namespaces, num_chunks| RemovedChunks {
        num_namespaces,
        num_chunks,
        num_bytes: num_chunks * FRAME as u64,
        ..RemovedChunks::default()
    };
    assert_eq!(remove(&none, "03"), removed(0, 0), "another namespace");
    assert_eq!(remove(&none, "0101"), removed(1, 12));
    assert_eq!(remove(&none, &"01".repeat(32)), removed(1, 0), "the full name of the namespace");
    assert_eq!(remove(&none, &format!("{}00", "01".repeat(31))), removed(0, 0));
    let shared = DiskRoot::shared();
    let first = open(1, &over(&shared));
    let found = |store: &Store| {
        (0..ROOTS.len()).map(|root| store.lookup(&chain_of(root, 0)).stored_units).collect()
    };
    let left: Vec<u32> = found(&first);
    assert_eq!(left, [6, 0, 0, 6, 6]);
    let said = remove(&none, "");
    assert!(said.is_cut_short && said.num_chunks == 0, "another owner has the directory");
    let expected = RemovedChunks { open: ["01".repeat(8)].into(), ..removed(1, 12) };
    assert_eq!(remove(&shared, ""), expected, "with another namespace open");
    assert_eq!(remove(&shared, "02"), removed(1, 0), "the namespace that is not open");
    drop(first);
    let left: Vec<u32> = found(&open(2, &pool()));
    assert_eq!(left, [6, 0, 0, 6, 6]);
}

/// Opening a closed namespace to remove chunks must not make room for it.
#[test]
fn removal_from_a_closed_namespace_keeps_all_other_chunks() {
    let dir = tempfile::tempdir().unwrap();
    let settings =
        DiskSettings { dir: dir.path().join("disk"), cap_bytes: 400 << 10, ..disk_settings(64, 1) };
    let shared = DiskRoot::shared();
    let pool = Pool::create(Arc::clone(&shared), 64 * FRAME as u64, FRAME as u64, || {}).unwrap();
    let open = |nth: u8| {
        let disk = Some(settings.clone());
        let config = StoreConfig { disk, namespace: [nth; 32], ..config(64, Eviction::Lru) };
        Store::open_in(&config, &pool, None).unwrap()
    };
    for nth in [2, 3] {
        let store = open(nth);
        for root in 0..ROOTS.len() {
            let chain = chain_of(root, 0);
            save(&store, &arena_of(&store), &chain, 0..chain.num_blocks());
        }
        assert!(store.flush(LONG));
        store.close(LONG);
    }
    let _first = open(1);
    let removed = remove_closed(&settings, &shared, "02", Some(SaltTag::of(SALTS[0]))).unwrap();
    assert_eq!((removed.num_chunks, removed.is_cut_short), (12, false));
    let mut chunks: Vec<_> =
        inspect(&settings.dir).unwrap().iter().map(|space| space.chunks).collect();
    chunks.sort_unstable();
    assert_eq!(chunks, [0, 18, 30]);
}

/// Expiry runs often, and opening a namespace marks it as recently used.
#[test]
fn an_eviction_but_no_expiry_clears_invalid_records_of_closed_namespaces() {
    let dir = tempfile::tempdir().unwrap();
    let settings =
        DiskSettings { dir: dir.path().join("disk"), cap_bytes: 1 << 20, ..disk_settings(64, 1) };
    let shared = DiskRoot::shared();
    let pool = Pool::create(Arc::clone(&shared), 64 * FRAME as u64, FRAME as u64, || {}).unwrap();
    let config = StoreConfig { disk: Some(settings.clone()), ..config(64, Eviction::Lru) };
    let (store, chain) = (Store::open_in(&config, &pool, None).unwrap(), chain_of(0, 0));
    save(&store, &arena_of(&store), &chain, 0..1);
    assert!(store.flush(LONG));
    store.close(LONG);
    let [space] = &inspect(&settings.dir).unwrap()[..] else { panic!("one namespace") };
    let files =
        std::fs::read_dir(settings.dir.join(&space.name)).unwrap().map(|file| file.unwrap().path());
    let is_index =
        |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with("index");
    let index = files.into_iter().find(is_index).unwrap();
    let mut bytes = std::fs::read(&index).unwrap();
    let at = bytes.iter().position(|byte| *byte != 0).expect("a record");
    bytes[at] ^= 1;
    std::fs::write(&index, &bytes).unwrap();
    remove_expired(&settings, &shared, &TenantLimits::default(), 0).unwrap();
    assert_eq!(std::fs::read(&index).unwrap(), bytes, "the namespace was opened");
    let removed = remove_closed(&settings, &shared, "", None).unwrap();
    assert_eq!((removed.num_chunks, removed.is_cut_short), (0, false));
    assert!(std::fs::read(&index).unwrap().iter().all(|byte| *byte == 0));
}
