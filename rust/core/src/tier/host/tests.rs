//! Frames that are held back, and when they are handed out.

use super::*;

fn taken(tier: &mut HostTier) -> Vec<u32> {
    std::iter::from_fn(|| tier.take(FrameFor::Save)).map(|frame| frame.0).collect()
}

#[test]
fn frames_from_the_limit_on_are_held_back_until_it_rises() {
    let mut tier = HostTier::create(4096, 8).unwrap();
    let high: Vec<_> = (0..8).filter_map(|_| tier.take(FrameFor::Save)).filter(|frame| frame.0 > 4).collect();
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
