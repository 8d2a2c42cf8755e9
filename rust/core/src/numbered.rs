//! A map from ascending numbers to values that are mostly removed in insertion order. It holds
//! reservations and saves in flight.
//!
//! With multiple KV cache groups, a prompt has thousands of entries. A sorted deque keeps
//! consecutive numbers adjacent in memory, whereas a hash map would scatter them.

use std::collections::VecDeque;

/// The deque is compacted once its length exceeds `2 * len + SPARE`.
const SPARE: usize = 64;

#[derive(Debug)]
pub(crate) struct Numbered<T> {
    /// Entries sorted by number. None marks a removed value, and the first entry always has a
    /// value.
    row: VecDeque<(u64, Option<T>)>,
    /// Number of values.
    len: usize,
    /// Index of the most recently found entry.
    hand: usize,
}

impl<T> Default for Numbered<T> {
    fn default() -> Self {
        Self { row: VecDeque::new(), len: 0, hand: 0 }
    }
}

impl<T> Numbered<T> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn reserve(&mut self, num: usize) {
        self.row.reserve(num);
    }

    /// Inserts or replaces a value. Takes constant time if `number` is the highest so far.
    pub(crate) fn insert(&mut self, number: u64, value: T) {
        let value = Some(value);
        if self.row.back().is_none_or(|(last, _)| *last < number) {
            self.row.push_back((number, value));
        } else {
            let at = self.row.partition_point(|(other, _)| *other < number);
            if self.row[at].0 == number {
                self.len -= usize::from(self.row[at].1.is_some());
                self.row[at].1 = value;
            } else {
                self.row.insert(at, (number, value));
            }
        }
        self.len += 1;
    }

    /// Returns the entry with the highest number that is at most `number`, or None if that entry's
    /// value was removed.
    pub(crate) fn up_to(&mut self, number: u64) -> Option<(u64, &mut T)> {
        let at = self.find(number)?;
        let (own, value) = self.row.get_mut(at)?;
        Some((*own, value.as_mut()?))
    }

    pub(crate) fn remove(&mut self, number: u64) -> Option<T> {
        let at = self.find(number)?;
        let value = self.row.get_mut(at).filter(|(own, _)| *own == number)?.1.take()?;
        self.len -= 1;
        self.tidy();
        Some(value)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        self.row.iter().filter_map(|(number, value)| Some((*number, value.as_ref()?)))
    }

    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.row.iter_mut().filter_map(|(_, value)| value.as_mut())
    }

    /// Returns the index of the last entry whose number is at most `number`. First tries the most
    /// recently found entry and its successor.
    fn find(&mut self, number: u64) -> Option<usize> {
        let is_there = |at: usize| {
            let is_above = |at| self.row.get(at).map(|(other, _)| *other > number);
            is_above(at) == Some(false) && is_above(at + 1) != Some(false)
        };
        let near = [self.hand, self.hand + 1].into_iter().find(|at| is_there(*at));
        self.hand = near
            .or_else(|| self.row.partition_point(|(other, _)| *other <= number).checked_sub(1))?;
        Some(self.hand)
    }

    /// Drops removed entries from the front, or all removed entries once there are many.
    fn tidy(&mut self) {
        while self.row.front().is_some_and(|(_, value)| value.is_none()) {
            self.row.pop_front();
            self.hand = self.hand.saturating_sub(1);
        }
        if self.row.len() > 2 * self.len + SPARE {
            self.row.retain(|(_, value)| value.is_some());
            self.hand = 0;
        }
    }
}

#[cfg(test)]
mod tests;
