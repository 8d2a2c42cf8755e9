//! Tests that the pages of each shard are placed on the shard's NUMA node.

use proptest::prelude::*;

use super::{FRAME_ALIGN, MAX_PLACES, Place, bit, by_shard};

fn node_at(places: &[Place], byte: u64) -> Vec<u64> {
    places
        .iter()
        .filter(|place| (place.start..place.end).contains(&byte))
        .map(|place| place.nodes)
        .collect()
}

proptest! {
    #[test]
    fn each_part_lies_on_its_shards_node(
        nodes in prop::collection::vec(0_u32..4, 1..9), pages in 1_u64..5, num_frames in 1_u32..20,
    ) {
        let (part_bytes, num_parts) = (pages * FRAME_ALIGN, nodes.len() as u64);
        let places = by_shard(part_bytes * num_parts, num_frames, &nodes);
        for page in 0..u64::from(num_frames) * num_parts * pages {
            let shard = usize::try_from(page / pages % num_parts).unwrap();
            prop_assert_eq!(node_at(&places, page * FRAME_ALIGN), [1_u64 << nodes[shard]]);
        }
        prop_assert!(places.iter().all(|place| place.start % FRAME_ALIGN == 0 && place.mode() == 1));
        let is_split = |pair: &[Place]| pair[0].end == pair[1].start && pair[0].nodes != pair[1].nodes;
        prop_assert!(places.windows(2).all(is_split), "adjacent pages on one node must form one range");
    }

    #[test]
    fn parts_that_are_not_whole_pages_lie_on_all_nodes_in_turn(pages in 0_u64..5, num_frames in 1_u32..20) {
        let frame_bytes = (2 * pages + 1) * FRAME_ALIGN;
        let places = by_shard(frame_bytes, num_frames, &[1, 0]);
        prop_assert_eq!(&places, &[Place { start: 0, end: frame_bytes * u64::from(num_frames), nodes: 0b11 }]);
        prop_assert_eq!(places[0].mode(), 3);
    }
}

#[test]
fn more_ranges_than_the_system_should_keep_are_one() {
    let frames = u32::try_from(MAX_PLACES / 2).unwrap();
    assert_eq!(by_shard(2 * FRAME_ALIGN, frames, &[0, 1]).len() as u64, MAX_PLACES);
    assert_eq!(by_shard(2 * FRAME_ALIGN, frames + 1, &[0, 1]).len(), 1);
}

#[test]
fn a_node_that_no_mask_has_is_left_out() {
    assert_eq!((bit(63), bit(64)), (1 << 63, 0));
    assert_eq!(by_shard(FRAME_ALIGN, 1, &[64]), []);
    assert_eq!(by_shard(FRAME_ALIGN, 1, &[]), []);
    assert_eq!(by_shard(FRAME_ALIGN, 0, &[0]), []);
}
