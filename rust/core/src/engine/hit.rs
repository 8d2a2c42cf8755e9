//! Finds the deepest hit: the longest prefix of whole units that has all needed chunks in every
//! group.
//!
//! Full-attention chunks depend on the chunks before them, so a single lookup finds the end of the
//! stored prefix. Other groups' chunks are saved and evicted individually, so they are looked up
//! backward from that end.

use super::group::{Group, GroupKind};
use crate::Result;
use crate::key::KeyChain;
use crate::session::Session;
use crate::store::{Lookup, Prefix};

/// After a miss, the next lookup also covers `LOOK_BACK` earlier units, and each subsequent lookup
/// covers `LOOK_FURTHER` times as many, because every lookup is a round trip to the server.
const LOOK_BACK: u32 = 64;
const LOOK_FURTHER: u32 = 4;

/// Selects a count from a lookup result: units in host memory, or units in any tier.
type Tiers = fn(&Lookup) -> u32;

/// One group's lookup results for consecutive units from `start`.
struct Column<'a> {
    group: &'a Group,
    number: u32,
    start: u32,
    found: Vec<Lookup>,
}

impl Column<'_> {
    fn end(&self) -> u32 {
        self.start + u32::try_from(self.found.len()).unwrap_or(u32::MAX)
    }

    /// Returns true if all chunks needed by a prefix of `num_units` units have been looked up.
    fn has(&self, num_units: u32) -> bool {
        let needed = self.group.units(num_units);
        needed.is_empty() || self.start <= needed.start && num_units <= self.end()
    }

    /// Returns the units to look up for a prefix of `num_units` units, plus `further` earlier
    /// units.
    fn missing(&self, num_units: u32, further: u32) -> std::ops::Range<u32> {
        let first = self.group.units(num_units).start.saturating_sub(further);
        first..if self.start < num_units && num_units <= self.end() {
            self.start
        } else {
            num_units
        }
    }

    fn add(&mut self, start: u32, mut found: Vec<Lookup>) {
        if start + u32::try_from(found.len()).unwrap_or(u32::MAX) == self.start {
            found.append(&mut self.found);
        }
        (self.start, self.found) = (start, found);
    }

    fn is_there(&self, unit: u32, tiers: Tiers) -> bool {
        tiers(&self.found[(unit - self.start) as usize]) > 0
    }

    /// Returns `num_units` if all chunks needed by a prefix of this length are stored. Otherwise,
    /// returns a smaller number of units such that no prefix length in between is a hit.
    fn nearest(&self, num_units: u32, tiers: Tiers) -> u32 {
        let Some(missing) =
            self.group.units(num_units).rev().find(|unit| !self.is_there(*unit, tiers))
        else {
            return num_units;
        };
        if self.group.kind == GroupKind::Local {
            return missing; // a prefix that ends between two attention chunks needs neither
        }
        (self.start..missing)
            .rev()
            .find(|unit| self.is_there(*unit, tiers))
            .map_or(self.start, |unit| unit + 1)
    }
}

/// Returns the deepest hits in host memory and in any tier, both capped by `most`. `chain` must
/// have at least `most.stored_units` units.
pub(super) fn deepest(
    session: &dyn Session,
    groups: &[Group],
    chain: &KeyChain,
    most: Lookup,
) -> Result<Lookup> {
    let independent = groups.iter().filter(|group| !group.is_full());
    let column = |group| Column {
        group,
        number: group.number.unwrap_or_default(),
        start: 0,
        found: Vec::new(),
    };
    let mut columns: Vec<_> = independent.map(column).collect();
    let stored_units =
        search(session, chain, &mut columns, most.stored_units, |found| found.stored_units)?;
    let host_units =
        search(session, chain, &mut columns, most.host_units.min(stored_units), |found| {
            found.host_units
        })?;
    Ok(Lookup { host_units, stored_units })
}

fn search(
    session: &dyn Session,
    chain: &KeyChain,
    columns: &mut [Column<'_>],
    most: u32,
    tiers: Tiers,
) -> Result<u32> {
    let (mut num_units, mut further) = (most, 0);
    while num_units > 0 {
        let unknown: Vec<_> = columns.iter_mut().filter(|column| !column.has(num_units)).collect();
        if !unknown.is_empty() {
            look_up(session, chain, unknown, num_units, further)?;
            further = if further == 0 { LOOK_BACK } else { further.saturating_mul(LOOK_FURTHER) };
        }
        let nearest = columns
            .iter()
            .map(|column| column.nearest(num_units, tiers))
            .min()
            .unwrap_or(num_units);
        if nearest == num_units {
            break;
        }
        num_units = nearest;
    }
    Ok(num_units)
}

fn look_up(
    session: &dyn Session,
    chain: &KeyChain,
    columns: Vec<&mut Column<'_>>,
    num_units: u32,
    further: u32,
) -> Result<()> {
    let asked: Vec<_> = columns.iter().map(|column| column.missing(num_units, further)).collect();
    let keys = columns
        .iter()
        .zip(&asked)
        .map(|(column, units)| chain.independent_keys(column.number, units.clone()));
    let keys = keys.collect::<Result<Vec<_>>>()?;
    let each =
        keys.iter().flat_map(|(root, keys)| keys.chunks(1).map(|key| Prefix::new(*root, key)));
    let mut found = session.lookup_many(&each.collect::<Vec<_>>()).into_iter();
    for (column, units) in columns.into_iter().zip(asked) {
        let own: Vec<_> = units.clone().map(|_| found.next().unwrap_or_default()).collect();
        column.add(units.start, own);
    }
    Ok(())
}
