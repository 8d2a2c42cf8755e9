//! Values by ascending numbers, removed mostly in the order of insertion: reservations and saves in
//! flight.
//!
//! A prompt of several KV cache groups has thousands of them at once. So they stand in a row, where
//! the next that is asked for is next to the last one; a hash map has each in another place. Must
//! not depend on the type of the values.

use std::collections::VecDeque;

/// Places of values that left, more than values that are there, before the row is tidied up.
const SPARE: usize = 64;

/// A map whose keys are numbers; see above.
#[derive(Debug)]
pub(crate) struct Numbered<T> {
    /// In the order of their numbers; None: it left. The first is there.
    row: VecDeque<(u64, Option<T>)>,
    /// Values that are there.
    len: usize,
    /// Where one was found last.
    hand: usize,
}

impl<T> Default for Numbered<T> {
    fn default() -> Self {
        Self { row: VecDeque::new(), len: 0, hand: 0 }
    }
}

impl<T> Numbered<T> {
    /// Values that are there.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Room for `num` more.
    pub(crate) fn reserve(&mut self, num: usize) {
        self.row.reserve(num);
    }

    /// Enters a value in the place of one with the same number. It costs little if all others have
    /// lower numbers.
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

    /// The highest number up to `number` that was entered, and its value; None if that left.
    pub(crate) fn up_to(&mut self, number: u64) -> Option<(u64, &mut T)> {
        let at = self.find(number)?;
        let (own, value) = self.row.get_mut(at)?;
        Some((*own, value.as_mut()?))
    }

    /// Takes a value out.
    pub(crate) fn remove(&mut self, number: u64) -> Option<T> {
        let at = self.find(number)?;
        let value = self.row.get_mut(at).filter(|(own, _)| *own == number)?.1.take()?;
        self.len -= 1;
        self.tidy();
        Some(value)
    }

    /// All, in the order of their numbers.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        self.row.iter().filter_map(|(number, value)| Some((*number, value.as_ref()?)))
    }

    /// The same, to be changed.
    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.row.iter_mut().filter_map(|(_, value)| value.as_mut())
    }

    /// The last place whose number is not above `number`: most often where one was found before, or
    /// the next.
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

    /// Gives places up from which values left: at the front at once, others when there are many.
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
