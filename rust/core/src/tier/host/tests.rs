//! Frames that are held back, and when they are handed out.

use super::*;

fn taken(tier: &mut HostTier) -> Vec<u32> {
    std::iter::from_fn(|| tier.take(FrameFor::Save)).map(|frame| frame.0).collect()
}

#[test]
fn frames_from_the_limit_on_are_held_back_until_it_rises() {
    let mut tier = HostTier::create(4096, 8).unwrap();
    let high: Vec<_> =
        (0..8).filter_map(|_| tier.take(FrameFor::Save)).filter(|frame| frame.0 > 4).collect();
    tier.limit(3);
    (0..5).rev().map(FrameId).chain(high).for_each(|frame| tier.give(frame));
    assert_eq!(tier.num_frames().1, 8);
    assert_eq!(taken(&mut tier), [0, 1, 2]);
    assert_eq!(tier.num_frames().1, 5);
    tier.limit(6);
    assert_eq!(
        {
            let mut more = taken(&mut tier);
            more.sort_unstable();
            more
        },
        [3, 4, 5]
    );
    tier.give(FrameId(1));
    tier.limit(1);
    assert_eq!((taken(&mut tier), tier.num_frames().1), (vec![], 3));
    tier.limit(u32::MAX);
    assert_eq!(taken(&mut tier).len(), 3);
}

#[test]
fn a_slab_that_is_emptied_hands_out_no_frame_and_goes_with_its_last() {
    let pool = Pool::create(64 * 4096, 4096, || {}).unwrap();
    let mut tier = HostTier::join(&pool, None, 4096, 64).unwrap();
    let first = tier.take(FrameFor::Save).or_else(|| tier.grow(FrameFor::Save)).unwrap();
    assert!(tier.grow(FrameFor::Save).is_some() && tier.num_frames() == (4, 2));
    assert!(tier.lend(FrameId(3)).is_none(), "free frames may be another store's soon");
    let slab = tier.drain(u32::MAX, Some(first)).unwrap();
    assert_eq!((tier.num_frames(), taken(&mut tier)), ((2, 0), vec![]));
    tier.keep(slab);
    assert_eq!(taken(&mut tier), [2, 3]);
    let slab = tier.drain(u32::MAX, Some(first)).unwrap();
    tier.give(FrameId(0));
    assert_eq!(taken(&mut tier), [0; 0], "what comes back to it stays with it");
    (1..4).for_each(|frame| tier.give(FrameId(frame)));
    assert!(!tier.grid().unwrap().is_draining(slab));
    assert_eq!((tier.num_frames(), tier.grid().unwrap().member().num_slabs().0), ((0, 0), 0));
}
