//! Compares `Numbered` with a map from the standard library.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::{Numbered, SPARE};

#[derive(Debug, Clone)]
enum Step {
    /// Adds this many entries, with this gap between consecutive numbers.
    Enter(usize, u64),
    /// Inserts a number out of order, as if another thread had inserted a higher number first.
    EnterBelow(u64),
    /// Removes entries. The fields are the first index, the number of entries, and whether to
    /// remove them in reverse order.
    Leave(usize, usize, bool),
    Ask(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..200_usize, 1..3_u64).prop_map(|(num, apart)| Step::Enter(num, apart)),
        (0..400_u64).prop_map(Step::EnterBelow),
        (0..300_usize, 0..200_usize, any::<bool>())
            .prop_map(|(nth, num, is_turned)| Step::Leave(nth, num, is_turned)),
        (0..600_u64).prop_map(Step::Ask),
    ]
}

proptest! {
    #[test]
    fn is_a_map_with_bounded_empty_places(steps in prop::collection::vec(step(), 1..40)) {
        let (mut row, mut model, mut next) = (Numbered::default(), BTreeMap::new(), 1_u64);
        let mut is_gone = std::collections::BTreeSet::new();
        for step in steps {
            match step {
                Step::Enter(num, apart) => for _ in 0..num {
                    next += apart;
                    row.insert(next, next * 10);
                    model.insert(next, next * 10);
                },
                Step::EnterBelow(number) => {
                    row.insert(number, number * 7);
                    model.insert(number, number * 7);
                    is_gone.remove(&number);
                    next = next.max(number);
                }
                Step::Leave(nth, num, is_turned) => {
                    let mut some: Vec<_> = model.keys().copied().skip(nth).take(num).collect();
                    if is_turned {
                        some.reverse();
                    }
                    for number in some {
                        prop_assert_eq!(row.remove(number), model.remove(&number));
                        prop_assert_eq!(row.remove(number), None, "the entry was removed before");
                        is_gone.insert(number);
                    }
                }
                Step::Ask(number) => {
                    let found = row.up_to(number).map(|(number, value)| (number, *value));
                    let below = model.range(..=number).next_back().map(|(number, value)| (*number, *value));
                    let has_left = is_gone.range(..=number).next_back();
                    let hides = has_left.is_some_and(|gone| below.is_none_or(|(own, _)| own < *gone));
                    // `up_to` returns None for a removed entry that is still in the deque.
                    prop_assert!(found == below || (hides && found.is_none()), "{found:?} {below:?}");
                }
            }
            prop_assert_eq!(row.len(), model.len());
            prop_assert_eq!(row.iter().map(|(number, value)| (number, *value)).collect::<BTreeMap<_, _>>(), model.clone());
            prop_assert!(row.row.len() <= 2 * row.len() + SPARE);
            prop_assert!(row.row.front().is_none_or(|(_, value)| value.is_some()));
        }
    }
}
