//! Multimodal items of one request, and the positions they cover.
//!
//! Items may overlap (audio inside video), so a block looks up all items that overlap it. Must not
//! depend on how items enter a key.

use std::ops::Range;

use crate::{Error, Result};

/// One item: `num_tokens` placeholder positions from `start` on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) identifier: Box<str>,
    pub(super) start: u32,
    pub(super) num_tokens: u32,
}

impl Item {
    fn end(&self) -> u64 {
        u64::from(self.start) + u64::from(self.num_tokens)
    }
}

/// Items by start, then identifier: their order in keys.
#[derive(Debug, Clone, Default)]
pub(super) struct Items {
    sorted: Vec<Item>,
    /// `reach[i]` is the largest end of `sorted[..=i]`; it is monotone, for binary search.
    reach: Vec<u64>,
}

impl Items {
    /// Adds an item, unless it is already present. `InvalidConfig` if it is present with another
    /// length.
    pub(super) fn add(&mut self, item: Item) -> Result<()> {
        match self.sorted.binary_search_by(|have| {
            (have.start, &have.identifier).cmp(&(item.start, &item.identifier))
        }) {
            Ok(at) if self.sorted[at].num_tokens == item.num_tokens => return Ok(()),
            Ok(at) => {
                let message = "an item was declared twice with different lengths; declare it once";
                return Err(Error::invalid(message)
                    .with_context("identifier", &item.identifier)
                    .with_context("start", item.start)
                    .with_context("num_tokens", self.sorted[at].num_tokens)
                    .with_context("again", item.num_tokens));
            }
            Err(at) => {
                self.sorted.insert(at, item);
                self.reach.truncate(at);
            }
        }
        for item in &self.sorted[self.reach.len()..] {
            self.reach.push(item.end().max(self.reach.last().copied().unwrap_or(0)));
        }
        Ok(())
    }

    pub(super) fn contains(&self, item: &Item) -> bool {
        self.sorted.contains(item)
    }

    /// The first position at or after `position` that an item covers.
    pub(super) fn next_covered(&self, position: u64) -> Option<u64> {
        let after = self.sorted.partition_point(|item| u64::from(item.start) <= position);
        if after > 0 && self.reach[after - 1] > position {
            return Some(position);
        }
        self.sorted.get(after).map(|item| u64::from(item.start))
    }

    /// The items that overlap `positions`, in order.
    pub(super) fn overlapping(&self, positions: Range<u64>) -> impl Iterator<Item = &Item> {
        let stop = self.sorted.partition_point(|item| u64::from(item.start) < positions.end);
        let start = self.reach[..stop].partition_point(|&reach| reach <= positions.start);
        self.sorted[start..stop].iter().filter(move |item| item.end() > positions.start)
    }
}
