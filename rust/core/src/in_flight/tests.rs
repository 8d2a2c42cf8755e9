//! Compares `InFlight` with a map that has one entry per ticket. Ranks report in any order. Some
//! reports are repeated or name tickets that are not in flight.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::{InFlight, Settled};
use crate::chunk_batch::ChunkBatch;
use crate::io::{FrameId, SizeClass};
use crate::key::ChunkKey;
use crate::store::{Reservation, Reserved};

const RANKS: u32 = 2;
const KEY: ChunkKey = ChunkKey([7; 32]);

#[derive(Debug, Clone)]
enum Step {
    /// Plans saves for this many chunks. If the flag is true, replaces the store first.
    Plan(u32, bool),
    /// One rank reports a range of tickets, given by its first ticket and its length.
    Report(u64, u64),
    Fail(u64),
    Misfit(u64),
    FailAll,
    /// Removes a ticket that no rank will report.
    Remove(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..40_u32, prop::bool::weighted(0.1)).prop_map(|(num, anew)| Step::Plan(num, anew)),
        8 => (0..200_u64, 0..60_u64).prop_map(|(from, num)| Step::Report(from, num)),
        2 => (0..200_u64).prop_map(Step::Fail),
        1 => (0..200_u64).prop_map(Step::Misfit),
        1 => Just(Step::FailAll),
        2 => (0..200_u64).prop_map(Step::Remove),
    ]
}

#[derive(Debug)]
struct Row {
    what: Settled,
    num_left: u32,
    block: i32,
}

fn planned(first: u64, num: u32) -> ChunkBatch {
    let reservation = |nth: u32| Reservation {
        ticket: first + u64::from(nth),
        frame: FrameId(nth),
        key: KEY,
        unit: nth,
    };
    // Reuse the same blocks, because multiple saves can read the same block.
    let table: Vec<_> = (1..).take(num as usize).collect();
    let reserved = Reserved { chunks: (0..num).map(reservation).collect(), num_dropped: 0 };
    let mut batch = ChunkBatch::default();
    batch.add_saves(0, &[reserved], &table, 0, 1).expect("the row fits");
    batch
}

fn reported(model: &mut BTreeMap<u64, Row>, ticket: u64) -> Option<Settled> {
    let row = model.get_mut(&ticket)?;
    row.num_left -= 1;
    if row.num_left > 0 { None } else { model.remove(&ticket).map(|row| row.what) }
}

proptest! {
    #[test]
    fn each_save_is_settled_once_with_its_outcome(steps in prop::collection::vec(step(), 1..60)) {
        let (mut flights, mut model) = (InFlight::new(), BTreeMap::<u64, Row>::new());
        let (mut next, mut number) = (1, 1);
        for step in steps {
            match step {
                Step::Plan(num, anew) => {
                    if anew && num > 0 {
                        number = 1;
                        for row in model.values_mut() {
                            row.what.reservation = None;
                        }
                    }
                    let batch = flights.add(planned(number, num), RANKS);
                    let tickets: Vec<_> = (next..).take(num as usize).collect();
                    prop_assert_eq!(batch.tickets(), &tickets);
                    for (ticket, nth) in tickets.into_iter().zip(0_u32..) {
                        let reservation = Some(number + u64::from(nth));
                        let block = i32::try_from(nth).expect("few") + 1;
                        let (group, class, misfit) = (0, SizeClass(0), None);
                        let what = Settled { reservation, failed: false, group, class, misfit };
                        model.insert(ticket, Row { what, num_left: RANKS, block });
                    }
                    next += u64::from(num);
                    number += u64::from(num);
                }
                Step::Report(from, num) => for ticket in from..from + num {
                    prop_assert_eq!(flights.report(ticket), reported(&mut model, ticket), "ticket {}", ticket);
                },
                Step::Fail(ticket) => {
                    flights.fail(ticket);
                    if let Some(row) = model.get_mut(&ticket) {
                        row.what.failed = true;
                    }
                }
                Step::Misfit(ticket) => {
                    flights.mark_misfit(ticket);
                    if let Some(row) = model.get_mut(&ticket) {
                        (row.what.failed, row.what.misfit) = (true, Some(KEY));
                    }
                }
                Step::FailAll => {
                    flights.fail_all();
                    for row in model.values_mut() {
                        row.what.failed = true;
                    }
                }
                Step::Remove(ticket) => {
                    prop_assert_eq!(flights.remove(ticket), model.remove(&ticket).map(|row| row.what));
                }
            }
            prop_assert_eq!(flights.len(), model.len());
            prop_assert_eq!(flights.tickets(), model.keys().copied().collect::<Vec<_>>());
            let mut reads: Vec<_> = model.values().map(|row| row.block).collect();
            reads.sort_unstable();
            reads.dedup();
            let mut found = flights.being_read(None);
            found.sort_unstable();
            prop_assert_eq!(found, reads);
        }
    }
}
