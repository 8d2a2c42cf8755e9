//! Tenant limits: how much of each tier a tenant may use and how long its chunks live. Holds the
//! configured limits and their values in 4096-byte pages.
//!
//! A *class* is a row of [`Table`]. There is one class for requests without a salt, one for salts
//! without individual limits, and one for each salt with individual limits.

use rustc_hash::FxHashMap;

use crate::io::FRAME_ALIGN;
use crate::key::SaltTag;

/// How much of a tier a tenant may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quota {
    /// Absolute size, in bytes.
    Bytes(u64),
    /// Share of the tier, in millionths. A nonzero share always covers at least the largest frame.
    Share(u32),
}

/// Limits of one tenant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Host memory quota. In a pool, [`Quota::Share`] is relative to the store's share of the pool.
    pub host: Option<Quota>,
    /// Disk quota.
    pub disk: Option<Quota>,
    /// Time to live after a save, in seconds.
    pub ttl_s: Option<u32>,
}

/// The limits of a store's tenants.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TenantLimits {
    /// Limits shared by all requests without a salt.
    pub unsalted: Limits,
    /// Limits for each salt that has no individual limits.
    pub salted: Limits,
    /// Limits of individual salts.
    pub by_salt: Vec<(SaltTag, Limits)>,
}

impl TenantLimits {
    fn all(&self) -> impl Iterator<Item = &Limits> {
        [&self.unsalted, &self.salted]
            .into_iter()
            .chain(self.by_salt.iter().map(|(_, limits)| limits))
    }

    /// Returns the shortest time to live, in seconds.
    pub fn shortest_ttl_s(&self) -> Option<u32> {
        self.all().filter_map(|limits| limits.ttl_s).min()
    }

    pub(crate) fn is_set(&self) -> bool {
        self.all().any(|limits| *limits != Limits::default())
    }
}

/// Index of a row of [`Table`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct Class(u32);

/// The class of requests without a salt.
pub(crate) const UNSALTED: Class = Class(0);
const SALTED: Class = Class(1);

/// A class's limits: quotas in pages ([`Ceiling::NONE`] if unlimited), and the time to live in
/// seconds (None if unlimited).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ceiling {
    pub(crate) host: u64,
    pub(crate) disk: u64,
    pub(crate) ttl_s: Option<u32>,
}

impl Ceiling {
    pub(crate) const NONE: u64 = u64::MAX;
}

/// Tier sizes, in pages, that relative quotas are based on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Bases {
    pub(crate) host: u64,
    pub(crate) disk: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Table {
    limits: Vec<Limits>,
    ceilings: Vec<Ceiling>,
    by_salt: FxHashMap<SaltTag, Class>,
    /// Size of the largest frame, in pages.
    frame_pages: u64,
    pub(crate) bases: Bases,
    pub(crate) has_quotas: bool,
}

impl Table {
    /// Creates the table, which is empty if no limits are set.
    pub(crate) fn new(of: &TenantLimits, frame_pages: u64, bases: Bases) -> Self {
        if !of.is_set() {
            return Self::default();
        }
        let classes = (0..).map(Class).skip(2);
        let mut table = Self {
            limits: of.all().copied().collect(),
            ceilings: Vec::new(),
            by_salt: of.by_salt.iter().map(|(tag, _)| *tag).zip(classes).collect(),
            frame_pages,
            bases,
            has_quotas: of.all().any(|limits| limits.host.is_some() || limits.disk.is_some()),
        };
        table.count();
        table
    }

    pub(crate) fn set_bases(&mut self, bases: Bases) {
        if self.bases != bases {
            self.bases = bases;
            self.count();
        }
    }

    fn count(&mut self) {
        let of = |quota: Option<Quota>, base: u64| {
            quota.map_or(Ceiling::NONE, |quota| self.pages(quota, base))
        };
        let ceiling = |limits: &Limits| Ceiling {
            host: of(limits.host, self.bases.host),
            disk: of(limits.disk, self.bases.disk),
            ttl_s: limits.ttl_s,
        };
        self.ceilings = self.limits.iter().map(ceiling).collect();
    }

    fn pages(&self, quota: Quota, base: u64) -> u64 {
        match quota {
            Quota::Bytes(bytes) => bytes / FRAME_ALIGN,
            Quota::Share(0) => 0,
            Quota::Share(millionths) => {
                (base.saturating_mul(millionths.into()) / 1_000_000).max(self.frame_pages)
            }
        }
    }

    pub(crate) fn class_of(&self, tag: Option<SaltTag>) -> Class {
        match tag {
            None => UNSALTED,
            Some(tag) => self.by_salt.get(&tag).copied().unwrap_or(SALTED),
        }
    }

    pub(crate) fn ceiling(&self, class: Class) -> Ceiling {
        let none = Ceiling { host: Ceiling::NONE, disk: Ceiling::NONE, ttl_s: None };
        self.ceilings.get(class.0 as usize).copied().unwrap_or(none)
    }
}
