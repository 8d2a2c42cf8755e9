//! Checks per-salt quotas and TTLs against a dictionary of saved chunks and their save times. See
//! `store_quota.rs` for examples.
//!
//! All quotas together fit into each tier, so a tenant must never lose a chunk to another tenant.
#![expect(clippy::unwrap_used, reason = "tests")]

mod store_common;

use kvloft_core::io::SizeClass;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvloft_core::evict::Eviction;
use kvloft_core::io::FrameId;
use kvloft_core::key::{ChunkKey, KeyChain, SaltTag};
use kvloft_core::store::{
    Evict, Limits, Prefix, Quota, ReadLease, SaveRequest, Store, StoreConfig, TenantLimits,
    WriteLease,
};
use kvloft_testing::one_prefix::StoreExt;
use proptest::prelude::*;
use store_common::{
    MemoryDisk, arena_of, bytes, chain_of, config, disk_settings, fill, stat, verify,
};

const FRAMES: u32 = 32;
const SLOTS: u32 = 64;
const SALTS: [Option<&str>; 4] = [None, Some("a"), Some("b"), Some("c")];
const NUM_PROMPTS: u32 = 6;
const LEN: u32 = 6;
const START_S: u64 = 1_700_000_000;

fn limits(host: u32, disk: u32, ttl_s: u32) -> Limits {
    Limits { host: Some(bytes(host)), disk: Some(bytes(disk)), ttl_s: Some(ttl_s) }
}

/// The salt "a" has individual limits, and chunks without a salt never expire.
fn all_limits(is_small: bool) -> TenantLimits {
    let salted = if is_small { limits(4, 5, 2000) } else { limits(8, 16, 2000) };
    let unsalted = Limits { ttl_s: None, ..salted };
    let own = if is_small { limits(3, 4, 700) } else { limits(6, 9, 700) };
    TenantLimits { unsalted, salted, by_salt: vec![(SaltTag::of("a"), own)] }
}

fn limits_of(all: &TenantLimits, salt: usize) -> Limits {
    [all.unsalted, all.by_salt[0].1, all.salted, all.salted][salt]
}

fn size(quota: Option<Quota>) -> u64 {
    match quota {
        Some(Quota::Bytes(bytes)) => bytes,
        _ => panic!("only sizes are supported"),
    }
}

#[derive(Debug, Clone)]
enum Step {
    Save { salt: usize, prompt: u32, len: u32, is_independent: bool },
    Reserve { salt: usize, prompt: u32, len: u32 },
    Commit(usize),
    Abort(usize),
    Load { salt: usize, prompt: u32, is_held: bool },
    Release(usize),
    Evict { salt: usize },
    Discard { salt: usize, prompt: u32, at: u32 },
    Wait(u64),
    Tend,
    Reopen { is_small: bool, seconds: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    let (salt, salted, prompt) = (0..SALTS.len(), 1..SALTS.len(), 0..NUM_PROMPTS);
    prop_oneof![
        12 => (salt.clone(), prompt.clone(), 1..=LEN, prop::bool::weighted(0.2))
            .prop_map(|(salt, prompt, len, is_independent)| Step::Save { salt, prompt, len, is_independent }),
        3 => (salt.clone(), prompt.clone(), 1..=LEN).prop_map(|(salt, prompt, len)| Step::Reserve { salt, prompt, len }),
        3 => (0..8_usize).prop_map(Step::Commit),
        1 => (0..8_usize).prop_map(Step::Abort),
        4 => (salt.clone(), prompt.clone(), any::<bool>())
            .prop_map(|(salt, prompt, is_held)| Step::Load { salt, prompt, is_held }),
        2 => (0..8_usize).prop_map(Step::Release),
        1 => salted.prop_map(|salt| Step::Evict { salt }),
        1 => (salt, prompt, 0..LEN).prop_map(|(salt, prompt, at)| Step::Discard { salt, prompt, at }),
        3 => (1..800_u64).prop_map(Step::Wait),
        2 => Just(Step::Tend),
        2 => (any::<bool>(), 0..800_u64).prop_map(|(is_small, seconds)| Step::Reopen { is_small, seconds }),
    ]
}

/// A prompt's keys: the keys of its prefix, and the keys of independent chunks of another group.
struct Prompt {
    salt: usize,
    chain: KeyChain,
    attached: (ChunkKey, Vec<ChunkKey>),
}

/// A store on an in-memory disk, and a record of its saves.
struct World {
    disk: Arc<MemoryDisk>,
    store: Option<Store>,
    eviction: Eviction,
    limits: TenantLimits,
    /// When the store was opened, in seconds of the store's clock and as Unix time.
    opened: (u64, u64),
    prompts: Vec<Prompt>,
    /// Unix time at which each key was saved, in seconds.
    saved_s: BTreeMap<ChunkKey, u64>,
    writes: Vec<WriteLease>,
    reads: Vec<ReadLease>,
}

impl World {
    fn new(eviction: Eviction) -> Self {
        let prompts =
            (0..SALTS.len()).flat_map(|salt| (0..NUM_PROMPTS).map(move |prompt| (salt, prompt)));
        let of = |(salt, prompt): (usize, u32)| {
            let chain = chain_of(SALTS[salt], prompt, LEN);
            let attached = chain.independent_keys(1, 0..LEN).unwrap();
            Prompt { salt, chain, attached }
        };
        let mut world = Self {
            disk: MemoryDisk::new(SLOTS),
            store: None,
            eviction,
            limits: all_limits(false),
            opened: (0, START_S),
            prompts: prompts.map(of).collect(),
            saved_s: BTreeMap::new(),
            writes: Vec::new(),
            reads: Vec::new(),
        };
        world.open();
        world
    }

    fn open(&mut self) {
        let config = StoreConfig {
            disk: Some(disk_settings(SLOTS.into(), 1)),
            now_s: self.opened.1 - self.opened.0, // these tests do not restart the clock
            limits: self.limits.clone(),
            ..config(FRAMES, self.eviction)
        };
        self.store = Some(self.disk.open(&config, &self.disk.entries()));
    }

    fn store(&self) -> &Store {
        self.store.as_ref().unwrap()
    }

    /// Returns the Unix time in seconds.
    fn now_s(&self) -> u64 {
        self.disk.now_s() + self.opened.1 - self.opened.0
    }

    fn prompt(&self, salt: usize, prompt: u32) -> &Prompt {
        &self.prompts[salt * NUM_PROMPTS as usize + prompt as usize]
    }

    /// Returns, for each salt, the keys found in host memory and the keys found in any tier.
    fn found(&self) -> Vec<[BTreeSet<ChunkKey>; 2]> {
        let mut found = vec![<[BTreeSet<ChunkKey>; 2]>::default(); SALTS.len()];
        for Prompt { salt, chain, attached } in &self.prompts {
            let lookup = self.store().lookup(chain);
            let own = &mut found[*salt];
            own[0].extend(&chain.keys()[..lookup.host_units as usize]);
            own[1].extend(&chain.keys()[..lookup.stored_units as usize]);
            for key in &attached.1 {
                let lookup =
                    self.store().lookup(Prefix::new(attached.0, std::slice::from_ref(key)));
                own[0].extend((lookup.host_units > 0).then_some(key));
                own[1].extend((lookup.stored_units > 0).then_some(key));
            }
        }
        found
    }

    /// Checks that every chunk found has a known save time and has not expired.
    fn check_ages(&self, found: &[[BTreeSet<ChunkKey>; 2]]) {
        let now_s = self.now_s();
        for (salt, own) in found.iter().enumerate() {
            for key in &own[1] {
                let saved_s = self.saved_s[key];
                let ttl_s = limits_of(&self.limits, salt).ttl_s.unwrap_or(u32::MAX);
                assert!(now_s < saved_s + u64::from(ttl_s), "{key} is {} s old", now_s - saved_s);
            }
        }
    }

    fn check_quotas(&self) {
        for tenant in self.store().tenants(16).0 {
            let salt = SALTS.iter().position(|salt| salt.map(SaltTag::of) == tenant.tag).unwrap();
            let Limits { host, disk, .. } = limits_of(&self.limits, salt);
            assert_eq!(
                (tenant.max_host_bytes, tenant.max_disk_bytes),
                (Some(size(host)), Some(size(disk)))
            );
            assert!(tenant.host_bytes <= size(host), "{tenant:?}");
            assert!(tenant.disk_bytes <= size(disk), "{tenant:?}");
        }
    }

    fn tend(&self) {
        self.store().sweep();
        assert!(self.disk.flush(self.store()));
        self.store().sweep(); // the flush may have advanced the clock
    }

    fn reserve(
        &mut self,
        salt: usize,
        prompt: u32,
        len: u32,
        is_independent: bool,
    ) -> Vec<WriteLease> {
        let Prompt { chain, attached, .. } = self.prompt(salt, prompt);
        let keys = &attached.1[..len as usize];
        let prefix =
            if is_independent { Prefix::new(attached.0, keys) } else { Prefix::from(chain) };
        let asked = SaveRequest { prefix, units: 0..len, class: SizeClass(0), is_independent };
        let leases = self.store().reserve_many(None, &[asked]).unwrap().remove(0).chunks;
        let (now_s, on_disk) = (self.now_s(), self.disk.chunks());
        for key in leases.iter().map(|lease| lease.reservation().key) {
            let saved_s = self.saved_s.entry(key).or_insert(now_s);
            *saved_s = if on_disk.contains_key(&key) { *saved_s } else { now_s };
        }
        let arena = arena_of(self.store());
        for lease in &leases {
            fill(&arena, lease.reservation());
        }
        leases
    }

    fn salt_of(&self, key: &ChunkKey) -> usize {
        let has =
            |prompt: &&Prompt| prompt.chain.keys().contains(key) || prompt.attached.1.contains(key);
        self.prompts.iter().find(has).unwrap().salt
    }

    fn load(&mut self, salt: usize, prompt: u32, is_held: bool) {
        let lease = self.store().acquire(&self.prompt(salt, prompt).chain);
        let arena = arena_of(self.store());
        for chunk in
            lease.frames().iter().filter(|chunk| chunk.tier == kvloft_core::store::TierName::Host)
        {
            let frame: FrameId = chunk.frame;
            assert_eq!(verify(&arena, frame, chunk.key), None, "I1");
        }
        while is_held && lease.poll().pending_units > 0 {
            std::thread::yield_now();
        }
        if is_held {
            self.reads.push(lease);
        }
    }

    /// Runs a step and returns the tenants whose chunks may be missing afterwards.
    fn step(&mut self, step: &Step) -> BTreeSet<usize> {
        match *step {
            Step::Save { salt, prompt, len, is_independent } => {
                let leases = self.reserve(salt, prompt, len, is_independent);
                self.store().commit(leases);
                return [salt].into();
            }
            Step::Reserve { salt, prompt, len } => {
                let leases = self.reserve(salt, prompt, len, false);
                self.writes.extend(leases);
                return [salt].into();
            }
            Step::Commit(num) => {
                let leases: Vec<_> = self.writes.drain(..num.min(self.writes.len())).collect();
                let salts =
                    leases.iter().map(|lease| self.salt_of(&lease.reservation().key)).collect();
                self.store().commit(leases);
                return salts;
            }
            Step::Abort(num) => drop(self.writes.drain(..num.min(self.writes.len()))),
            Step::Load { salt, prompt, is_held } => {
                self.load(salt, prompt, is_held);
                return [salt].into();
            }
            Step::Release(num) => drop(self.reads.drain(..num.min(self.reads.len()))),
            Step::Evict { salt } => {
                let what = Evict { salt: SALTS[salt].map(SaltTag::of), is_host_only: false };
                assert!(
                    !self
                        .store()
                        .evict(what, Instant::now() + Duration::from_secs(60))
                        .is_cut_short
                );
                return [salt].into();
            }
            Step::Discard { salt, prompt, at } => {
                let key = self.prompt(salt, prompt).chain.keys()[at as usize];
                self.store().discard(&[key]);
                return [salt].into();
            }
            Step::Wait(seconds) => self.disk.wait(seconds),
            Step::Tend => self.tend(),
            Step::Reopen { is_small, seconds } => self.reopen(is_small, seconds),
        }
        let is_all = matches!(step, Step::Wait(_) | Step::Tend | Step::Reopen { .. });
        if is_all { (0..SALTS.len()).collect() } else { BTreeSet::new() }
    }

    fn reopen(&mut self, is_small: bool, seconds: u64) {
        self.writes.clear();
        self.reads.clear();
        assert!(self.disk.flush(self.store()));
        let calendar = self.now_s() + seconds;
        self.store = None;
        self.limits = all_limits(is_small);
        self.opened = (self.disk.now_s(), calendar);
        self.open();
        self.tend(); // a smaller quota takes effect gradually
    }

    fn run(&mut self, steps: &[Step]) {
        for step in steps {
            let before = self.found();
            let time = self.now_s();
            let may_lose = self.step(step);
            self.store().check().unwrap();
            assert!(self.disk.flush(self.store()));
            self.store().check().unwrap();
            let found = self.found();
            self.check_ages(&found);
            self.check_quotas();
            let has_aged = self.now_s() != time;
            for salt in (0..SALTS.len()).filter(|salt| !may_lose.contains(salt) && !has_aged) {
                for tier in 0..2 {
                    assert!(
                        before[salt][tier].is_subset(&found[salt][tier]),
                        "{step:?} removed chunks of salt {salt}"
                    );
                }
            }
        }
        self.end();
    }

    /// Checks that leases and expired chunks leave nothing behind.
    fn end(&mut self) {
        self.writes.clear();
        self.reads.clear();
        self.disk.wait(701);
        self.tend();
        self.store().check().unwrap();
        let now_s = self.now_s();
        for (key, meta) in self.disk.chunks() {
            let ttl_s = limits_of(&self.limits, self.salt_of(&key)).ttl_s.unwrap_or(u32::MAX);
            assert!(now_s < meta.saved_s + u64::from(ttl_s), "{key} is still on disk");
        }
        let of_a = self
            .store()
            .tenants(16)
            .0
            .into_iter()
            .find(|tenant| tenant.tag == Some(SaltTag::of("a")));
        assert_eq!(of_a, None, "all chunks are past the limit");
        assert_eq!([stat(self.store(), "pins"), stat(self.store(), "frames_reserved")], [0, 0]);
        assert!(self.disk.violations().is_empty(), "{:?}", self.disk.violations());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn no_tenant_exceeds_its_quota_and_no_chunk_its_ttl(
        steps in prop::collection::vec(step(), 1..60), is_adaptive: bool,
    ) {
        World::new(if is_adaptive { Eviction::Adaptive } else { Eviction::Lru }).run(&steps);
    }
}
