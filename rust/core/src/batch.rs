//! Chunks as columns: the one form of "these chunks" from the store's answer to the kernel's table and back to commit.
//!
//! A long prompt has thousands of chunks, and a forward or the first byte of a load waits for them, so there is no object
//! for each. It must not know the store, Python, or what the blocks hold.

use std::ops::Range;

use crate::io::FrameId;
use crate::key::ChunkKey;
use crate::store::{LeasedFrame, Reservation, TierName};
use crate::{Error, ErrorKind, Result};

/// In the blocks of a batch: this block of the chunk is not copied.
pub const NOT_WANTED: i32 = -1;
/// A block that belongs to no request. It is never saved.
pub const NULL_BLOCK: i32 = 0;

/// Frames, their keys, and the paged blocks on the other side of the copy.
///
/// Each chunk has one entry in `blocks` per block of its frame: a block id, or [`NOT_WANTED`] before and behind the run of
/// blocks that is copied. Saves have tickets, loads have none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkBatch {
    rows: Vec<Row>,
    blocks: Vec<i32>,
    tickets: Vec<u64>,
}

/// A chunk's frame and key, and where its entries in `blocks` end; they begin where those of the chunk before end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Row {
    frame: u32,
    end: usize,
    key: [u8; 32],
}

/// One chunk of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk<'a> {
    /// Where its bytes are, or go to.
    pub frame: FrameId,
    /// What it is.
    pub key: ChunkKey,
    /// Blocks that the frame holds.
    pub num_blocks: usize,
    /// The first of them that is copied.
    pub first_block: usize,
    /// Paged blocks from there on.
    pub blocks: &'a [i32],
    /// Number of its reservation.
    pub ticket: Option<u64>,
}

/// Columns as little-endian bytes, as they cross between processes; the numbers of blocks instead of their sums.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Columns<T> {
    /// u32.
    pub frames: T,
    /// 32 bytes each.
    pub keys: T,
    /// u32, of each chunk.
    pub num_blocks: T,
    /// i32, of all chunks.
    pub blocks: T,
    /// u64, or none at all.
    pub tickets: T,
}

/// Blocks that a load takes from each tier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BlocksByTier {
    /// From chunks that were in host.
    pub host: u32,
    /// From chunks that were on disk.
    pub disk: u32,
}

impl BlocksByTier {
    pub(crate) fn add(&mut self, tier: TierName, num: u32) {
        *match tier {
            TierName::Host => &mut self.host,
            TierName::Disk => &mut self.disk,
        } += num;
    }

    pub(crate) fn total(self) -> u32 {
        self.host + self.disk
    }
}

fn invalid(what: &'static str) -> Error {
    Error::new(ErrorKind::InvalidConfig, what)
}

fn numbers<T, const N: usize>(bytes: &[u8], of: fn([u8; N]) -> T) -> Result<Vec<T>> {
    let (items, rest) = bytes.as_chunks::<N>();
    if rest.is_empty() { Ok(items.iter().map(|item| of(*item)).collect()) } else { Err(invalid("a column is cut off")) }
}

fn bytes<T: Copy, const N: usize>(numbers: &[T], of: fn(T) -> [u8; N]) -> Vec<u8> {
    numbers.iter().flat_map(|number| of(*number)).collect()
}

/// No block has a negative number; one of them means that a block is not copied.
fn check_table(table: &[i32]) -> Result<()> {
    let is_right = table.iter().all(|block| *block >= 0);
    is_right.then_some(()).ok_or_else(|| invalid("a block table with a negative number"))
}

/// Where the run of wanted blocks is among those of one chunk; None if there is none, or something else beside it.
fn wanted(blocks: &[i32]) -> Option<Range<usize>> {
    let start = blocks.iter().position(|block| *block != NOT_WANTED)?;
    let stop = blocks.iter().rposition(|block| *block != NOT_WANTED)? + 1;
    blocks[start..stop].iter().all(|block| *block >= 0).then_some(start..stop)
}

impl ChunkBatch {
    fn with_capacity(num_chunks: usize) -> Self {
        Self { rows: Vec::with_capacity(num_chunks), blocks: Vec::with_capacity(num_chunks), tickets: Vec::new() }
    }

    /// `InvalidConfig` for columns that do not fit together, or a chunk whose wanted blocks are not one run.
    pub fn from_columns(columns: &Columns<&[u8]>) -> Result<Self> {
        let frames = numbers(columns.frames, u32::from_le_bytes)?;
        let keys = numbers(columns.keys, |key: [u8; 32]| key)?;
        let num_blocks = numbers(columns.num_blocks, u32::from_le_bytes)?;
        let blocks = numbers(columns.blocks, i32::from_le_bytes)?;
        let tickets = numbers(columns.tickets, u64::from_le_bytes)?;
        let has_tickets = tickets.is_empty() || tickets.len() == frames.len();
        if keys.len() != frames.len() || num_blocks.len() != frames.len() || !has_tickets {
            return Err(invalid("columns of different lengths"));
        }
        let mut rows = Vec::with_capacity(frames.len());
        let mut rest = blocks.as_slice();
        for ((frame, key), num) in frames.into_iter().zip(keys).zip(num_blocks) {
            let (own, behind) = rest.split_at_checked(num as usize).ok_or_else(|| invalid("blocks are missing"))?;
            wanted(own).ok_or_else(|| invalid("the blocks of a chunk are not one run"))?;
            rest = behind;
            rows.push(Row { frame, end: blocks.len() - rest.len(), key });
        }
        if rest.is_empty() { Ok(Self { rows, blocks, tickets }) } else { Err(invalid("blocks of no chunk")) }
    }

    /// The opposite of [`Self::from_columns`].
    pub fn columns(&self) -> Columns<Vec<u8>> {
        let num_blocks = (0..self.len()).map(|nth| u32::try_from(self.blocks_of(nth).len()).unwrap_or(u32::MAX));
        Columns {
            frames: self.rows.iter().flat_map(|row| row.frame.to_le_bytes()).collect(),
            keys: self.rows.iter().flat_map(|row| row.key).collect(),
            num_blocks: num_blocks.flat_map(u32::to_le_bytes).collect(),
            blocks: bytes(&self.blocks, i32::to_le_bytes),
            tickets: bytes(&self.tickets, u64::to_le_bytes),
        }
    }

    /// What was reserved, to be filled from the blocks that `table` names, `each` for one of the store's, from block `first` of the
    /// prefix on. Its tickets are the store's numbers. `InvalidConfig` for a chunk outside the table, or a negative number in it.
    ///
    /// A chunk with a null block is left out: the numbers of such chunks come back beside the batch.
    pub fn of_saves(reserved: &[Reservation], table: &[i32], first: u32, each: u32) -> Result<(Self, Vec<u64>)> {
        check_table(table)?;
        let mut batch = Self::with_capacity(reserved.len());
        let mut without_kv = Vec::new();
        for chunk in reserved {
            let from = chunk.first_block.checked_sub(first).ok_or_else(|| invalid("a chunk before the block table"))?;
            let (from, num_blocks) =
                (from.saturating_mul(each) as usize, chunk.num_blocks.saturating_mul(each) as usize);
            let blocks = table.get(from..).and_then(|rest| rest.get(..num_blocks));
            let blocks = blocks.ok_or_else(|| invalid("the block table is too short"))?;
            if blocks.contains(&NULL_BLOCK) {
                without_kv.push(chunk.ticket);
            } else {
                batch.push(chunk.frame.0, chunk.key.0, blocks.iter().copied());
                batch.tickets.push(chunk.ticket);
            }
        }
        Ok((batch, without_kv))
    }

    /// What a lease covers of the blocks from `begin` on, into those that `table` names; and how many blocks that is.
    /// `InvalidConfig` for a negative number in the table.
    ///
    /// It ends before the first block that the lease has not got.
    pub fn of_loads(leased: &[LeasedFrame], table: &[i32], begin: u32) -> Result<(Self, BlocksByTier)> {
        check_table(table)?;
        let mut batch = Self::with_capacity(leased.len());
        let mut by_tier = BlocksByTier::default();
        let end = begin.saturating_add(u32::try_from(table.len()).unwrap_or(u32::MAX));
        let mut covered = begin;
        for chunk in leased {
            let chunk_end = chunk.first_block.saturating_add(chunk.num_blocks);
            let (lo, hi) = (chunk.first_block.max(begin), chunk_end.min(end));
            if lo >= hi {
                continue;
            }
            if lo != covered {
                break;
            }
            covered = hi;
            let wanted = &table[(lo - begin) as usize..(hi - begin) as usize];
            let not_wanted = |blocks: Range<u32>| blocks.map(|_| NOT_WANTED);
            let blocks = not_wanted(chunk.first_block..lo).chain(wanted.iter().copied());
            batch.push(chunk.frame.0, chunk.key.0, blocks.chain(not_wanted(hi..chunk_end)));
            by_tier.add(chunk.tier, hi - lo);
        }
        Ok((batch, by_tier))
    }

    fn push(&mut self, frame: u32, key: [u8; 32], blocks: impl Iterator<Item = i32>) {
        self.blocks.extend(blocks);
        self.rows.push(Row { frame, end: self.blocks.len(), key });
    }

    /// Gives the chunks tickets from `first` on, in their order; returns those that they had.
    pub(crate) fn number(&mut self, first: u64) -> Vec<u64> {
        let tickets = (first..).take(self.tickets.len()).collect();
        std::mem::replace(&mut self.tickets, tickets)
    }

    /// Chunks.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is no chunk.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Numbers of the reservations; none for loads.
    pub fn tickets(&self) -> &[u64] {
        &self.tickets
    }

    fn blocks_of(&self, nth: usize) -> &[i32] {
        let start = nth.checked_sub(1).map_or(0, |before| self.rows[before].end);
        &self.blocks[start..self.rows[nth].end]
    }

    /// Chunk `nth`, which must be there.
    pub fn chunk(&self, nth: usize) -> Chunk<'_> {
        let every = self.blocks_of(nth);
        let run = wanted(every).unwrap_or_default();
        Chunk {
            frame: FrameId(self.rows[nth].frame),
            key: ChunkKey(self.rows[nth].key),
            num_blocks: every.len(),
            first_block: run.start,
            blocks: &every[run],
            ticket: self.tickets.get(nth).copied(),
        }
    }

    /// Paged blocks that are copied, of all chunks.
    pub fn wanted_blocks(&self) -> impl Iterator<Item = i32> + '_ {
        self.blocks.iter().copied().filter(|block| *block != NOT_WANTED)
    }

    /// These chunks, which must be there, in this order.
    #[must_use]
    pub fn take(&self, chunks: impl IntoIterator<Item = usize>) -> Self {
        let chunks = chunks.into_iter();
        let mut taken = Self::with_capacity(chunks.size_hint().0);
        for nth in chunks {
            taken.push(self.rows[nth].frame, self.rows[nth].key, self.blocks_of(nth).iter().copied());
            taken.tickets.extend(self.tickets.get(nth));
        }
        taken
    }

    /// In the order of frames, so that neighbours in the arena, in whichever order they were given out, are one copy.
    #[must_use]
    pub fn by_frame(&self) -> Self {
        let mut order: Vec<_> = (0..self.len()).collect();
        order.sort_by_key(|nth| self.rows[*nth].frame);
        self.take(order)
    }

    /// All chunks of `batches`, which all have tickets, or none of them.
    pub fn concat<'a>(batches: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut all = Self::with_capacity(0);
        for batch in batches {
            let before = all.blocks.len();
            all.rows.extend(batch.rows.iter().map(|row| Row { end: before + row.end, ..*row }));
            all.blocks.extend_from_slice(&batch.blocks);
            all.tickets.extend_from_slice(&batch.tickets);
        }
        all
    }

    /// `InvalidConfig` if a copy would reach outside the arena, its frame or the paged KV.
    pub fn check(&self, num_frames: u32, num_blocks: u32, blocks_per_chunk: u32) -> Result<()> {
        let is_block = |block: i32| block == NOT_WANTED || u32::try_from(block).is_ok_and(|block| block < num_blocks);
        if self.rows.iter().any(|row| row.frame >= num_frames) {
            return Err(invalid("a frame is not one of the arena's").with_context("num_frames", num_frames));
        }
        if (0..self.len()).any(|nth| self.blocks_of(nth).len() > blocks_per_chunk as usize) {
            let error = invalid("a chunk has more blocks than a frame");
            return Err(error.with_context("blocks_per_chunk", blocks_per_chunk));
        }
        if !self.blocks.iter().all(|block| is_block(*block)) {
            return Err(invalid("a block is not one of the paged KV").with_context("num_blocks", num_blocks));
        }
        Ok(())
    }
}
