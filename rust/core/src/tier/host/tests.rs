//! Tests frames beyond the limit, slabs that change size class, and released slabs.

use super::*;
use crate::tier::disk::DiskRoot;

const PAGE: u64 = 4096;
const ONE: SizeClass = SizeClass(0);
const TWO: SizeClass = SizeClass(1);

fn taken(tier: &mut HostTier) -> Vec<u32> {
    std::iter::from_fn(|| tier.take(FrameRequest::for_save(ONE))).map(|frame| frame.0).collect()
}

/// Takes frames of a class until the pool is exhausted.
fn grown(tier: &mut HostTier, class: SizeClass) -> Vec<FrameId> {
    std::iter::from_fn(|| tier.grow(FrameRequest::for_save(class))).collect()
}

#[test]
fn frames_from_the_limit_on_are_held_back_until_it_rises() {
    let mut tier = HostTier::create(8 * PAGE, &PAGE.into()).unwrap();
    let high: Vec<_> = (0..8)
        .filter_map(|_| tier.take(FrameRequest::for_save(ONE)))
        .filter(|frame| frame.0 > 4)
        .collect();
    tier.limit(3 * PAGE + 100);
    (0..5).rev().map(FrameId).chain(high).for_each(|frame| tier.release_frame(frame));
    assert_eq!(tier.num_frames().1, 8);
    assert_eq!(taken(&mut tier), [0, 1, 2]);
    assert_eq!(tier.num_frames().1, 5);
    tier.limit(6 * PAGE);
    let mut more = taken(&mut tier);
    more.sort_unstable();
    assert_eq!(more, [3, 4, 5]);
    tier.release_frame(FrameId(1));
    tier.limit(PAGE);
    assert_eq!((taken(&mut tier), tier.num_frames().1), (vec![], 3));
    tier.limit(u64::MAX);
    assert_eq!(taken(&mut tier).len(), 3);
}

#[test]
fn a_slab_that_is_emptied_hands_out_no_frame_and_goes_with_its_last() {
    let pool = Pool::create(DiskRoot::shared(), 64 * PAGE, PAGE, || {}).unwrap();
    let mut tier = HostTier::join(&pool, None, &PAGE.into()).unwrap();
    let wanted = Wanted { end: u32::MAX, class: None };
    let first = tier.grow(FrameRequest::for_save(ONE)).unwrap();
    assert!(tier.grow(FrameRequest::for_save(ONE)).is_some() && tier.num_frames() == (4, 2));
    assert!(
        tier.lend(FrameId(3)).is_none(),
        "free frames must not be lent, because another store may be using them"
    );
    let slab = tier.drain(wanted, Some(first)).unwrap();
    assert_eq!((tier.num_frames(), taken(&mut tier)), ((2, 0), vec![]));
    tier.keep(slab);
    assert_eq!(taken(&mut tier), [2, 3]);
    let slab = tier.drain(wanted, Some(first)).unwrap();
    tier.release_frame(FrameId(0));
    assert_eq!(taken(&mut tier), [0; 0], "returned frames must not be handed out");
    (1..4).for_each(|frame| tier.release_frame(FrameId(frame)));
    assert!(!tier.is_draining(slab));
    assert_eq!((tier.num_frames(), tier.member.num_slabs().0), ((0, 0), 0));
}

#[test]
fn frames_of_all_sizes_fill_the_arena() {
    let sizes = vec![PAGE, 10 * PAGE].into();
    let mut tier = HostTier::create(2000 * PAGE, &sizes).unwrap();
    let (mut small, mut large) = (0, 0);
    while tier.grow(FrameRequest::for_save(TWO)).is_some() {
        large += 1;
        small += (0..5).filter(|_| tier.grow(FrameRequest::for_save(ONE)).is_some()).count() as u64;
    }
    assert!(10 * large + small >= 1900, "{large} {small}");
    assert_eq!(tier.used_bytes(), (10 * large + small) * PAGE);
}

#[test]
fn an_empty_slab_serves_another_class_and_a_full_one_after_it_was_emptied() {
    let mut tier = HostTier::create(64 * PAGE, &vec![PAGE, 4 * PAGE].into()).unwrap();
    let small = grown(&mut tier, ONE);
    assert_eq!((small.len(), grown(&mut tier, TWO)), (64, vec![]));
    tier.set_hungry(FrameRequest::for_save(TWO));
    let slab = tier.drain(tier.wanted().unwrap(), None).unwrap();
    let own = |frame: &&FrameId| tier.grid(ONE).slab_of(frame.number()) == slab.0 as usize;
    let own: Vec<_> = small.iter().filter(own).copied().collect();
    for frame in &own {
        tier.release_frame(*frame);
    }
    assert!(!tier.is_hungry(), "the other class must get the slab immediately");
    let large = grown(&mut tier, TWO);
    assert_eq!(large.len() * 4, own.len());
    for frame in &large {
        tier.release_frame(*frame);
    }
    assert_eq!(grown(&mut tier, ONE).len(), own.len(), "an empty slab must not need draining");
}

#[test]
fn a_frame_of_another_class_does_not_fit_while_a_slab_is_emptied() {
    let mut tier = HostTier::create(64 * PAGE, &vec![PAGE, 4 * PAGE].into()).unwrap();
    let small = tier.grow(FrameRequest::for_save(ONE)).unwrap();
    assert!(tier.is_fit(small, FrameRequest::for_save(TWO)));
    tier.set_hungry(FrameRequest::for_save(TWO));
    assert!(
        !tier.is_fit(small, FrameRequest::for_save(TWO))
            && tier.is_fit(small, FrameRequest::for_save(ONE))
    );
}

#[test]
fn a_size_takes_no_slab_in_which_saves_cannot_use_its_frames() {
    let mut tier = HostTier::create(64 * PAGE, &vec![PAGE, 8 * PAGE].into()).unwrap();
    tier.limit(4 * PAGE);
    assert_eq!((grown(&mut tier, TWO), tier.member.num_slabs().0), (vec![], 0));
}

/// In the slab at the limit, workers can copy to small frames but not to large frames.
#[test]
fn no_slab_is_emptied_in_which_saves_cannot_use_the_frames() {
    let mut tier = HostTier::create(64 * PAGE, &vec![PAGE, 8 * PAGE].into()).unwrap();
    tier.limit(20 * PAGE);
    assert_eq!(grown(&mut tier, ONE).len(), 20);
    tier.set_hungry(FrameRequest::for_save(TWO));
    let slab = tier.drain(tier.wanted().unwrap(), None).unwrap();
    assert!(slab.0 < 2, "slab {} has no frame of this size below the limit", slab.0);
}

#[test]
fn an_empty_slab_that_saves_cannot_use_does_not_satisfy_them() {
    let pool = Pool::create(DiskRoot::shared(), 64 * PAGE, 8 * PAGE, || {}).unwrap();
    let mut tier = HostTier::join(&pool, None, &vec![PAGE, 8 * PAGE].into()).unwrap();
    let small = grown(&mut tier, ONE);
    tier.limit(16 * PAGE);
    tier.set_hungry(FrameRequest::for_save(TWO));
    for frame in &small[48..] {
        tier.release_frame(*frame);
    }
    assert!(tier.is_hungry(), "the last two of eight slabs are beyond the limit");
}

#[test]
fn a_read_gets_a_slab_beyond_the_limit() {
    let mut tier = HostTier::create(64 * PAGE, &vec![PAGE, 8 * PAGE].into()).unwrap();
    assert_eq!(grown(&mut tier, ONE).len(), 64);
    tier.limit(4 * PAGE);
    tier.set_hungry(FrameRequest::for_read(TWO));
    assert!(tier.drain(tier.wanted().unwrap(), None).is_some_and(|slab| slab.0 > 0));
}
