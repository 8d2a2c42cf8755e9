//! Tests that chains get the same keys when extended together as when extended individually.

use proptest::prelude::*;

use super::append_to_each;
use crate::key::{ChunkKey, KeyChain};

#[derive(Debug, Clone)]
struct Case {
    block_tokens: u32,
    lookahead: u32,
    known: Vec<u32>,
    items: Vec<(u8, u32, u32)>,
    ids: Vec<u32>,
}

impl Case {
    fn chain(&self, nth: usize) -> KeyChain {
        let root = ChunkKey([u8::try_from(nth).unwrap(); 32]);
        let mut chain = KeyChain::with_lookahead(
            root,
            self.block_tokens,
            self.lookahead.min(self.block_tokens),
        )
        .unwrap();
        for (name, start, num) in &self.items {
            let _same_with_another_length = chain.add_item(&name.to_string(), *start, *num);
        }
        chain.append_tokens(&self.known).unwrap();
        chain
    }
}

prop_compose! {
    /// Mostly generates typical steps, which append exactly one block to a chain of whole blocks.
    fn case()(
        block_tokens in prop_oneof![4 => Just(16_u32), 1 => 1_u32..40],
        blocks in 0_usize..3,
        odd in prop_oneof![3 => Just(0_usize), 1 => 0_usize..20],
        lookahead in prop_oneof![3 => Just(0_u32), 1 => 0_u32..3],
        items in prop::collection::vec((0_u8..3, 0_u32..60, 1_u32..20), 0..2),
        more in prop_oneof![3 => Just(None), 1 => (0_usize..50).prop_map(Some)],
        seed in any::<u32>(),
    ) -> Case {
        let size = block_tokens as usize;
        let known = (0..).take(blocks * size + odd).map(|at: u32| seed ^ at).collect();
        let ids = (0..).take(more.unwrap_or(size)).map(|at: u32| seed.wrapping_add(at)).collect();
        Case { block_tokens, lookahead, known, items, ids }
    }
}

proptest! {
    #[test]
    fn keys_equal_those_of_separate_chains(cases in prop::collection::vec(case(), 0..40)) {
        let mut wanted: Vec<_> = cases.iter().enumerate().map(|(nth, case)| case.chain(nth)).collect();
        let mut chains = wanted.clone();
        let mut pairs: Vec<_> = chains.iter_mut().zip(&cases).map(|(chain, case)| (chain, case.ids.as_slice())).collect();
        append_to_each(&mut pairs).unwrap();
        for ((chain, alone), case) in chains.iter_mut().zip(&mut wanted).zip(&cases) {
            alone.append_tokens(&case.ids).unwrap();
            // Later appends must also produce equal keys.
            alone.append_tokens(&case.known).unwrap();
            chain.append_tokens(&case.known).unwrap();
            prop_assert_eq!((chain.num_tokens(), chain.keys()), (alone.num_tokens(), alone.keys()));
        }
    }
}
