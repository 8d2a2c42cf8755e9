//! Tests that bytes are never lent to two borrowers concurrently, and that memory is placed on NUMA
//! nodes.

use super::super::numa::{MPOL_F_ADDR, prefer_numa_node};
use super::*;
use crate::ErrorKind;

/// Returns the kernel's memory policy for each page, read through a second mapping, or None if the
/// kernel does not support policies.
fn policies(arena: &HostArena, pages: impl Iterator<Item = usize>) -> Option<Vec<(i32, u64)>> {
    let other = Arena::open(&arena.path(), arena.size_bytes).unwrap();
    let policy = |page: usize| {
        let (mut mode, mut mask) = (-1_i32, 0_u64);
        let at = other.address() + page * 4096;
        // SAFETY: `mode` and `mask` are local variables, and the kernel does not access the memory
        // at the address.
        let done = unsafe {
            libc::syscall(
                libc::SYS_get_mempolicy,
                &raw mut mode,
                &raw mut mask,
                65_u64,
                at,
                MPOL_F_ADDR,
            )
        };
        (done == 0).then_some((mode, mask))
    };
    pages.map(policy).collect()
}

/// Returns true if the kernel accepts memory policies. Calls the kernel directly, so that a bug in
/// `place` cannot cause the test to be skipped.
fn system_places_memory() -> bool {
    let arena = HostArena::of_bytes(FRAME_ALIGN).unwrap();
    let page = Arena::open(&arena.path(), FRAME_ALIGN).unwrap();
    let (preferred, mask) = (1, 1_u64);
    // SAFETY: the page belongs to a mapping that outlives the call, and the kernel reads 64 bits of
    // the mask.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            page.address(),
            4096_usize,
            preferred,
            &raw const mask,
            65_u64,
            0,
        )
    };
    done == 0
}

/// Places every other page on the first node, which exists on every machine. The test uses more
/// ranges than can be placed through one temporary mapping.
#[test]
fn ranges_are_placed_for_every_mapping_and_no_other_page() {
    let num_pages = 2 * numa::PLACED_AT_ONCE as u64 + 100;
    let arena = HostArena::of_bytes(num_pages * FRAME_ALIGN).unwrap();
    let place =
        |page: u64| Place { start: page * FRAME_ALIGN, end: (page + 1) * FRAME_ALIGN, nodes: 1 };
    let places: Vec<_> = (0..num_pages).step_by(2).map(place).collect();
    if !system_places_memory() {
        eprintln!("skipped: this kernel rejects memory policies");
        return;
    }
    arena.place(&places).unwrap();
    let found = policies(&arena, 0..usize::try_from(num_pages).unwrap()).unwrap();
    let wanted = |page| if page % 2 == 0 { (1, 1) } else { (0, 0) };
    assert_eq!((0..).zip(found).find(|(page, found)| *found != wanted(*page)), None);
}

#[test]
fn pages_that_were_placed_stay_where_they_are() {
    if !system_places_memory() {
        eprintln!("skipped: this kernel rejects memory policies");
        return;
    }
    let arena = HostArena::of_bytes(4 * FRAME_ALIGN).unwrap();
    let worker = Arena::open(&arena.path(), 4 * FRAME_ALIGN).unwrap();
    let prefer =
        |page: usize, node| prefer_numa_node(worker.address() + page * 4096, 2 * 4096, node);
    assert!(!prefer(0, 63) && !prefer(0, 64), "nodes 63 and 64 do not exist");
    assert!(prefer(0, 0));
    assert_eq!(policies(&arena, 0..4), Some(vec![(1, 1), (1, 1), (0, 0), (0, 0)]));
    assert!(!prefer(0, 0), "the pages were already placed");
    arena.place(&[Place { start: 2 * FRAME_ALIGN, end: 4 * FRAME_ALIGN, nodes: 1 }]).unwrap();
    assert!(!prefer(2, 0), "the owner has already placed the pages");
}

#[test]
fn a_frame_is_lent_to_one_at_a_time_and_no_other_arena_gives_it_back() {
    let (arena, mut frames) = HostArena::create(FRAME_ALIGN, 130).unwrap();
    let mut held: Vec<_> = (0..130).filter_map(|id| frames.lend(FrameId(id))).collect();
    assert_eq!(held.len(), 130);
    assert!([0, 63, 64, 129, 130, u32::MAX].iter().all(|id| frames.lend(FrameId(*id)).is_none()));
    let frame = held.remove(64);
    frames.take_back(frame);
    assert!(
        !frames.is_lent(FrameId(64)) && [63, 65, 128].iter().all(|id| frames.is_lent(FrameId(*id)))
    );
    let mut again = frames.lend(FrameId(64)).unwrap();
    assert!(frames.lend(FrameId(64)).is_none() && again.bytes_mut().len() as u64 == FRAME_ALIGN);
    drop(again);
    assert!(frames.lend(FrameId(64)).is_none(), "a dropped frame must stay lent");
    let mut others = arena.frames(FRAME_ALIGN, &FRAME_ALIGN.into()).unwrap();
    let foreign = others.lend(FrameId(3)).unwrap();
    let _debug =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| frames.take_back(foreign)));
    assert!(frames.lend(FrameId(3)).is_none());
}

#[test]
fn no_bytes_are_lent_twice_whatever_the_size() {
    let arena = HostArena::of_bytes(8 * FRAME_ALIGN).unwrap();
    let sizes = vec![FRAME_ALIGN, 2 * FRAME_ALIGN].into();
    let mut frames = arena.frames(4 * FRAME_ALIGN, &sizes).unwrap();
    let [small, large] =
        [0, 1].map(|class| move |number| FrameId::new(super::super::SizeClass(class), number));
    let pair = frames.lend(large(1)).unwrap();
    assert!(frames.lend(small(2)).is_none() && frames.lend(small(3)).is_none());
    assert!(frames.lend(small(1)).is_some() && frames.lend(small(4)).is_some());
    frames.take_back(pair);
    assert!(frames.lend(small(3)).is_some() && frames.lend(large(1)).is_none());
    assert!(frames.lend(large(4)).is_none() && frames.lend(FrameId(2 << 28)).is_none());
}

#[test]
fn a_node_that_is_not_there_is_an_error_and_what_lies_behind_the_end_is_left_out() {
    let arena = HostArena::of_bytes(4 * FRAME_ALIGN).unwrap();
    let place = |nodes| [Place { start: 0, end: 100 * FRAME_ALIGN, nodes }];
    let error = arena.place(&place(1 << 63)).unwrap_err();
    assert!(error.kind() == ErrorKind::Io && error.to_string().contains("NUMA nodes"), "{error}");
    let _as_it_may_be = arena.place(&place(1));
    assert!(arena.place(&[]).is_ok());
    assert!(Arena::open(&arena.path(), 4 * FRAME_ALIGN).is_ok());
}
