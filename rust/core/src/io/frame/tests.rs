//! Tests that frames do not overlap, that each frame is inside a slab, and that frame ids
//! round-trip.

use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn frames_are_apart_and_each_lies_in_its_slab(
        arena_pages in 1_u64..400, slab_pages in 1_u64..50, frame_pages in 1_u64..50,
    ) {
        let [arena, slab, frame] =
            [arena_pages, slab_pages, frame_pages].map(|pages| pages * FRAME_ALIGN);
        let grid = FrameGrid::new(arena, slab, frame);
        prop_assert_eq!(grid.is_ok(), frame <= slab && slab <= arena);
        let Ok(grid) = grid else { return Ok(()) };
        let num_slabs = u32::try_from(arena / slab).unwrap();
        let mut end = 0;
        for number in 0..grid.num_frames() {
            let (start, own) = (grid.start(number), u64::from(grid.slab_of(number)));
            let slab_end = if own + 1 == u64::from(num_slabs) { arena } else { (own + 1) * slab };
            prop_assert!(start >= end && own * slab <= start && start + frame <= slab_end);
            prop_assert!(grid.frames_of(grid.slab_of(number)).contains(&number));
            end = start + frame;
        }
        let in_slabs: usize = (0..num_slabs).map(|slab| grid.frames_of(slab).len()).sum();
        prop_assert_eq!(in_slabs, grid.num_frames() as usize);
        prop_assert!(arena - end < frame, "there is space for another frame");
    }

    #[test]
    fn a_frame_number_keeps_class_and_number(class in 0_u8..16, number in 0_u32..1 << 28) {
        let frame = FrameId::new(SizeClass(class), number);
        prop_assert_eq!((frame.class(), frame.number()), (SizeClass(class), number));
    }
}
