//! One KV cache group's chunks in a batch, and their conversion to and from columns.

use std::ops::Range;

use crate::io::FrameId;
use crate::{Error, Result};

/// Sentinel block id: do not copy this block.
pub const NOT_WANTED: i32 = -1;

/// A nonempty list of one group's chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) group: u32,
    pub(super) rows: Vec<Row>,
    pub(super) blocks: Vec<i32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) frame: u32,
    pub(super) key: [u8; 32],
}

/// One group's chunks as columns of little-endian bytes, for transfer between processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Columns<T> {
    /// KV cache group number.
    pub group: u32,
    /// Frame ids, 4 bytes each.
    pub frames: T,
    /// Chunk keys, 32 bytes each.
    pub keys: T,
    /// Block ids, 4 bytes each. Every chunk has the same number of block ids.
    pub blocks: T,
}

pub(super) fn numbers<T, const N: usize>(bytes: &[u8], of: fn([u8; N]) -> T) -> Result<Vec<T>> {
    let (items, rest) = bytes.as_chunks::<N>();
    if rest.is_empty() {
        Ok(items.iter().map(|item| of(*item)).collect())
    } else {
        Err(Error::invalid("a column is truncated"))
    }
}

/// Rejects a block table with negative ids, such as [`NOT_WANTED`].
pub(super) fn check_table(table: &[i32]) -> Result<()> {
    let is_right = table.iter().all(|block| *block >= 0);
    is_right.then_some(()).ok_or_else(|| Error::invalid("a block table has a negative block id"))
}

/// Returns the range of blocks to copy in a chunk. Returns None if no block is to be copied, or if
/// the blocks to copy are not contiguous or have a negative id.
pub(super) fn wanted(blocks: &[i32]) -> Option<Range<usize>> {
    let start = blocks.iter().position(|block| *block != NOT_WANTED)?;
    let stop = blocks.iter().rposition(|block| *block != NOT_WANTED)? + 1;
    blocks[start..stop].iter().all(|block| *block >= 0).then_some(start..stop)
}

impl Part {
    pub(super) fn new(group: u32, num_chunks: usize, num_blocks: u32) -> Self {
        let blocks = Vec::with_capacity(num_chunks * num_blocks as usize);
        Self { group, rows: Vec::with_capacity(num_chunks), blocks }
    }

    pub(super) fn push(&mut self, frame: u32, key: [u8; 32], blocks: impl Iterator<Item = i32>) {
        self.blocks.extend(blocks);
        self.rows.push(Row { frame, key });
    }

    pub(super) fn blocks_of(&self, nth: usize) -> &[i32] {
        let num = self.blocks.len() / self.rows.len();
        &self.blocks[nth * num..(nth + 1) * num]
    }

    /// Converts columns to chunks. Returns `InvalidConfig` if the column lengths do not match or a
    /// chunk's blocks to copy are not contiguous.
    pub(super) fn from_columns(columns: &Columns<&[u8]>) -> Result<Self> {
        let frames = numbers(columns.frames, u32::from_le_bytes)?;
        let keys = numbers(columns.keys, |key: [u8; 32]| key)?;
        let blocks = numbers(columns.blocks, i32::from_le_bytes)?;
        if frames.is_empty()
            || keys.len() != frames.len()
            || !blocks.len().is_multiple_of(frames.len())
        {
            return Err(Error::invalid("column lengths do not match"));
        }
        let rows = frames.into_iter().zip(keys).map(|(frame, key)| Row { frame, key }).collect();
        let part = Self { group: columns.group, rows, blocks };
        if (0..part.rows.len()).any(|nth| wanted(part.blocks_of(nth)).is_none()) {
            return Err(Error::invalid("a chunk's blocks are not contiguous"));
        }
        Ok(part)
    }

    pub(super) fn columns(&self) -> Columns<Vec<u8>> {
        Columns {
            group: self.group,
            frames: self.rows.iter().flat_map(|row| row.frame.to_le_bytes()).collect(),
            keys: self.rows.iter().flat_map(|row| row.key).collect(),
            blocks: self.blocks.iter().flat_map(|block| block.to_le_bytes()).collect(),
        }
    }

    pub(super) fn check(
        &self,
        num_frames: u32,
        num_blocks: u32,
        blocks_per_chunk: u32,
    ) -> Result<()> {
        let is_block = |block: i32| {
            block == NOT_WANTED || u32::try_from(block).is_ok_and(|block| block < num_blocks)
        };
        if self.rows.iter().any(|row| FrameId(row.frame).number() >= num_frames) {
            return Err(Error::invalid("a frame is outside the arena")
                .with_context("num_frames", num_frames));
        }
        if self.blocks.len() != self.rows.len() * blocks_per_chunk as usize {
            let error = Error::invalid("a chunk and its frame have different block counts");
            return Err(error.with_context("blocks_per_chunk", blocks_per_chunk));
        }
        if !self.blocks.iter().all(|block| is_block(*block)) {
            return Err(Error::invalid("a block id is outside the paged KV cache")
                .with_context("num_blocks", num_blocks));
        }
        Ok(())
    }
}
