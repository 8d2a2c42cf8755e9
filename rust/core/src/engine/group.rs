//! Computes which chunks of each KV cache group a prefix needs.
//!
//! A prefix is a list of units with one chunk per group. To load a prefix, an engine needs all
//! chunks of a full-attention group, but only the last chunks of a sliding-window group and a
//! single state of a Mamba group.

use std::ops::Range;

use crate::io::SizeClass;
use crate::{Error, Result};

/// The part of a group that is needed to load a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupKind {
    /// A prefix needs every block.
    Full,
    /// A prefix needs the blocks covering the last `reach` tokens.
    Window,
    /// A prefix needs the blocks in the next token's attention chunk, which spans `reach` tokens.
    Local,
    /// A prefix needs only the state after its last token.
    State,
}

/// A model's KV cache group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// Group number hashed into the group's chunk keys, or None if the chunks use the prefix's
    /// keys.
    pub number: Option<u32>,
    /// The part of the group that a prefix needs.
    pub kind: GroupKind,
    /// Number of tokens per block.
    pub block_tokens: u32,
    /// Number of blocks per unit, which is at least one.
    pub blocks_per_unit: u32,
    /// Number of blocks per chunk. A chunk holds the last blocks of its unit. No prefix needs the
    /// earlier blocks, and vLLM may already have freed them.
    pub kept_blocks: u32,
    /// Size of the window or attention chunk in tokens, or 0 for other kinds.
    pub reach: u32,
    /// Size class for the group's frames.
    pub class: SizeClass,
    /// Size class for smaller frames that hold compressed chunks, if any. Some compressed chunks
    /// may not fit.
    pub compact: Option<SizeClass>,
}

impl Group {
    /// The only group of a model with full attention in all layers, with one block per unit.
    pub const ONLY: Self = Self {
        number: None,
        kind: GroupKind::Full,
        block_tokens: 1,
        blocks_per_unit: 1,
        kept_blocks: 1,
        reach: 0,
        class: SizeClass(0),
        compact: None,
    };

    /// Returns `InvalidConfig` if a size is zero or a chunk has more blocks than its unit.
    pub fn check(&self) -> Result<()> {
        let has_reach = self.reach > 0 || self.kind != GroupKind::Local;
        let has_blocks =
            self.block_tokens > 0 && (1..=self.blocks_per_unit).contains(&self.kept_blocks);
        if has_blocks && has_reach {
            return Ok(());
        }
        Err(Error::invalid(
            "a KV cache group has a size of 0, or more blocks per chunk than per unit",
        ))
    }

    /// Returns true if a prefix needs every chunk of the group, so that each chunk depends on all
    /// chunks before it.
    pub fn is_full(&self) -> bool {
        self.kind == GroupKind::Full
    }

    /// Returns the first block that a prefix of `num_units` units needs. The prefix also needs all
    /// later blocks.
    pub fn first_block(&self, num_units: u32) -> u32 {
        let [units, each, block, reach] =
            [num_units, self.blocks_per_unit, self.block_tokens, self.reach].map(u64::from);
        let num_tokens = units * each * block;
        let first = match self.kind {
            GroupKind::Full => 0,
            GroupKind::Window => num_tokens.saturating_sub(reach) / block,
            GroupKind::Local => num_tokens / reach * reach / block,
            GroupKind::State => (units * each).saturating_sub(1),
        };
        u32::try_from(first).unwrap_or(u32::MAX)
    }

    /// Returns the units that a prefix of `num_units` units needs. The prefix may need only part of
    /// the first unit.
    pub fn units(&self, num_units: u32) -> Range<u32> {
        self.first_block(num_units) / self.blocks_per_unit..num_units
    }
}
