//! A list of chunks, stored in columns. A batch carries chunks from the store's reservation or
//! lease to the copy kernel's table, and carries saved chunks on to the commit.
//!
//! Chunks are not separate objects, because a long prompt has thousands of them, and forward passes
//! and loads wait until their batches are built.

mod part;

use std::collections::BTreeSet;

pub use self::part::{Columns, NOT_WANTED};
use self::part::{Part, check_table, numbers, wanted};
use crate::engine::Group;
use crate::io::{FrameId, SizeClass};
use crate::key::ChunkKey;
use crate::store::{LeasedFrame, Reserved, TierName};
use crate::{Error, Result};

/// vLLM's null block, which no request owns and no save includes.
pub const NULL_BLOCK: i32 = 0;

/// Frames to copy, with their keys and paged blocks, for one or more KV cache groups.
///
/// Within a group, all chunks have the same number of entries in `blocks`, one per block of the
/// frame. Entries before and after the blocks to copy are [`NOT_WANTED`], and all other entries are
/// block ids. Only saves have tickets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChunkBatch {
    parts: Vec<Part>,
    tickets: Vec<u64>,
}

/// One chunk of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk<'a> {
    /// KV cache group number.
    pub group: u32,
    /// The frame to copy from or to.
    pub frame: FrameId,
    /// The chunk's key.
    pub key: ChunkKey,
    /// Number of blocks in the frame.
    pub num_blocks: usize,
    /// Index, within the frame, of the first block to copy.
    pub first_block: usize,
    /// Ids of the paged blocks to copy, starting at index `first_block` of the frame.
    pub blocks: &'a [i32],
    /// The save's ticket, or None for loads.
    pub ticket: Option<u64>,
}

/// Number of units that a load reads from each tier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UnitsByTier {
    /// Number of units in host memory.
    pub host: u32,
    /// Number of units on disk.
    pub disk: u32,
}

impl UnitsByTier {
    pub(crate) fn add(&mut self, tier: TierName, num: u32) {
        *match tier {
            TierName::Host => &mut self.host,
            TierName::Disk => &mut self.disk,
        } += num;
    }

    /// Raises the total to `num_units` by adding units that need no chunk. Counts the added units
    /// as disk units if any unit is on disk, and as host units otherwise.
    pub(crate) fn fill_up(&mut self, num_units: u32) {
        let missing = num_units.saturating_sub(self.host + self.disk);
        *if self.disk > 0 { &mut self.disk } else { &mut self.host } += missing;
    }
}

impl ChunkBatch {
    /// Creates a batch from columns. `tickets` holds one little-endian u64 per chunk, or is empty.
    /// Returns `InvalidConfig` if the column lengths do not match.
    pub fn from_columns(parts: &[Columns<&[u8]>], tickets: &[u8]) -> Result<Self> {
        let parts = parts.iter().map(Part::from_columns).collect::<Result<Vec<_>>>()?;
        let batch = Self { parts, tickets: numbers(tickets, u64::from_le_bytes)? };
        let has_tickets = batch.tickets.is_empty() || batch.tickets.len() == batch.len();
        has_tickets.then_some(batch).ok_or_else(|| Error::invalid("column lengths do not match"))
    }

    /// Converts the batch to columns, without tickets. The inverse of [`Self::from_columns`].
    pub fn columns(&self) -> impl Iterator<Item = Columns<Vec<u8>>> + '_ {
        self.parts.iter().map(Part::columns)
    }

    /// Adds reserved chunks of `group` with the blocks to gather. `table` lists `num_blocks` blocks
    /// per unit, starting at `first_unit`. Returns `InvalidConfig` if a chunk is outside the table
    /// or a block id is negative.
    ///
    /// Skips chunks that contain a null block and returns their tickets.
    pub fn add_saves(
        &mut self,
        group: u32,
        reserved: &[Reserved],
        table: &[i32],
        first_unit: u32,
        num_blocks: u32,
    ) -> Result<Vec<u64>> {
        check_table(table)?;
        let num_chunks = reserved.iter().map(|run| run.chunks.len()).sum();
        let (mut part, mut without_kv) = (Part::new(group, num_chunks, num_blocks), Vec::new());
        for chunk in reserved.iter().flat_map(|run| &run.chunks) {
            let unit = chunk.unit.checked_sub(first_unit).ok_or_else(|| {
                Error::invalid("a chunk comes before the block table's first unit")
            })?;
            let from = unit.saturating_mul(num_blocks) as usize;
            let blocks = table.get(from..).and_then(|rest| rest.get(..num_blocks as usize));
            let blocks = blocks.ok_or_else(|| Error::invalid("the block table is too short"))?;
            if blocks.contains(&NULL_BLOCK) {
                without_kv.push(chunk.ticket);
            } else {
                part.push(chunk.frame.0, chunk.key.0, blocks.iter().copied());
                self.tickets.push(chunk.ticket);
            }
        }
        self.add(part);
        Ok(without_kv)
    }

    /// Adds leased chunks of `group` and their destination blocks. The chunks belong to consecutive
    /// units, starting at `first_unit`. `table` starts at the group's block `begin`, and chunks
    /// outside the table are skipped. Returns the number of chunks added, by tier, and the number
    /// of blocks they fill. Returns `InvalidConfig` if a block id is negative.
    pub fn add_loads(
        &mut self,
        group: u32,
        leased: &[LeasedFrame],
        first_unit: u32,
        of: &Group,
        table: &[i32],
        begin: u32,
    ) -> Result<(UnitsByTier, usize)> {
        check_table(table)?;
        let (mut part, mut by_tier) =
            (Part::new(group, leased.len(), of.kept_blocks), UnitsByTier::default());
        let end = begin.saturating_add(u32::try_from(table.len()).unwrap_or(u32::MAX));
        let mut num_filled = 0;
        for (chunk, unit) in
            leased.iter().zip((first_unit..u32::MAX).chain(std::iter::repeat(u32::MAX)))
        {
            let chunk_end = unit.saturating_add(1).saturating_mul(of.blocks_per_unit);
            let chunk_begin = chunk_end.saturating_sub(of.kept_blocks);
            if chunk_end <= begin || chunk_end > end {
                continue;
            }
            by_tier.add(chunk.tier, 1);
            let from = chunk_begin.max(begin);
            let not_wanted = (chunk_begin..from).map(|_| NOT_WANTED);
            let wanted = &table[(from - begin) as usize..(chunk_end - begin) as usize];
            num_filled += wanted.len();
            part.push(chunk.frame.0, chunk.key.0, not_wanted.chain(wanted.iter().copied()));
        }
        self.add(part);
        Ok((by_tier, num_filled))
    }

    fn add(&mut self, part: Part) {
        if !part.rows.is_empty() {
            self.parts.push(part);
        }
    }

    /// Renumbers the tickets consecutively, starting at `first`. Returns the previous tickets.
    pub(crate) fn number(&mut self, first: u64) -> Vec<u64> {
        let tickets = (first..).take(self.tickets.len()).collect();
        std::mem::replace(&mut self.tickets, tickets)
    }

    /// Returns the number of chunks.
    pub fn len(&self) -> usize {
        self.parts.iter().map(|part| part.rows.len()).sum()
    }

    /// Returns true if there are no chunks.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Returns the tickets of all chunks. Loads have no tickets.
    pub fn tickets(&self) -> &[u64] {
        &self.tickets
    }

    /// Returns the part that contains the `nth` chunk, and the chunk's index in that part.
    fn find(&self, nth: usize) -> (&Part, usize) {
        let mut at = nth;
        for part in &self.parts {
            if at < part.rows.len() {
                return (part, at);
            }
            at -= part.rows.len();
        }
        unreachable!("chunk {nth} of {}", self.len())
    }

    /// Returns the `nth` chunk. `nth` must be less than `len`.
    pub fn chunk(&self, nth: usize) -> Chunk<'_> {
        let (part, at) = self.find(nth);
        let every = part.blocks_of(at);
        let run = wanted(every).unwrap_or_default();
        Chunk {
            group: part.group,
            frame: FrameId(part.rows[at].frame),
            key: ChunkKey(part.rows[at].key),
            num_blocks: every.len(),
            first_block: run.start,
            blocks: &every[run],
            ticket: self.tickets.get(nth).copied(),
        }
    }

    /// Returns all paged block ids to copy.
    pub fn wanted_blocks(&self) -> impl Iterator<Item = i32> + '_ {
        self.parts
            .iter()
            .flat_map(|part| &part.blocks)
            .copied()
            .filter(|block| *block != NOT_WANTED)
    }

    /// Returns a batch of the given chunks, in the given order. Each index must be less than `len`.
    #[must_use]
    pub fn take(&self, chunks: impl IntoIterator<Item = usize>) -> Self {
        let mut taken = Self::default();
        for nth in chunks {
            let (part, at) = self.find(nth);
            if taken.parts.last().is_none_or(|last| last.group != part.group) {
                taken.parts.push(Part::new(part.group, 1, 1));
            }
            if let Some(last) = taken.parts.last_mut() {
                last.push(
                    part.rows[at].frame,
                    part.rows[at].key,
                    part.blocks_of(at).iter().copied(),
                );
            }
            taken.tickets.extend(self.tickets.get(nth));
        }
        taken
    }

    /// Returns the batch with each group's chunks sorted by frame, so that adjacent frames can be
    /// copied together.
    #[must_use]
    pub fn by_frame(&self) -> Self {
        let (mut order, mut start) = (Vec::with_capacity(self.len()), 0);
        for part in &self.parts {
            let mut own: Vec<_> = (0..part.rows.len()).collect();
            own.sort_by_key(|at| part.rows[*at].frame);
            order.extend(own.into_iter().map(|at| start + at));
            start += part.rows.len();
        }
        self.take(order)
    }

    /// Splits the batch by group.
    pub fn by_group(&self) -> Vec<(u32, Self)> {
        let mut tickets = self.tickets.as_slice();
        let mut batch = |part: &Part| {
            let (own, behind) = tickets.split_at(part.rows.len().min(tickets.len()));
            tickets = behind;
            (part.group, Self { parts: vec![part.clone()], tickets: own.to_vec() })
        };
        self.parts.iter().map(&mut batch).collect()
    }

    /// Splits the batch by group and size class.
    pub fn by_size(&self) -> Vec<(u32, SizeClass, Self)> {
        let mut found = Vec::new();
        for (group, batch) in self.by_group() {
            let class = |nth: usize| FrameId(batch.parts[0].rows[nth].frame).class();
            let first = class(0);
            if (1..batch.len()).all(|nth| class(nth) == first) {
                found.push((group, first, batch));
                continue;
            }
            let classes: BTreeSet<_> = (0..batch.len()).map(class).collect();
            for each in classes {
                let own = (0..batch.len()).filter(|nth| class(*nth) == each);
                found.push((group, each, batch.take(own)));
            }
        }
        found
    }

    /// Concatenates all `batches` into a single batch for the group of the first batch. All batches
    /// must have the same number of blocks per chunk, and either all or none of them must have
    /// tickets.
    pub fn concat<'a>(batches: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut all = Self::default();
        for batch in batches {
            for part in &batch.parts {
                match all.parts.first_mut() {
                    None => all.parts.push(part.clone()),
                    Some(first) => {
                        first.rows.extend_from_slice(&part.rows);
                        first.blocks.extend_from_slice(&part.blocks);
                    }
                }
            }
            all.tickets.extend_from_slice(&batch.tickets);
        }
        all
    }

    /// Returns `InvalidConfig` if a copy would access memory outside the arena, its frame or the
    /// paged KV cache.
    pub fn check(&self, num_frames: u32, num_blocks: u32, blocks_per_chunk: u32) -> Result<()> {
        self.parts.iter().try_for_each(|part| part.check(num_frames, num_blocks, blocks_per_chunk))
    }
}
