//! What a session is asked about several KV cache groups at once: conversions only.
//!
//! A group of full attention keeps a prefix, as the chain's own; what others keep of a block hangs on no other block.

use kvloft_core::batch::NULL_BLOCK;
use kvloft_core::engine::{Cut, LoadRow, SaveRow};
use kvloft_core::key::{self, ChunkKey};
use kvloft_core::store::{Prefix, SaveRange, ToSave};
use pyo3::prelude::*;

use crate::batch::ChunkBatch;
use crate::error::{ConfigError, raise};
use crate::key::KeyChain;
use crate::tokens::block_ids;

/// Chain, token ids, tokens that the chain is to have, first block, behind the last one, each group's table.
pub(crate) type GroupsDue<'py> = (Bound<'py, KeyChain>, Bound<'py, PyAny>, u32, u32, u32, Bound<'py, PyAny>);

/// Which of the tables, the group's number (None: the chain's own keys), whether each block is kept alone, and how the table is cut.
pub(crate) type SavedGroup = (usize, Option<u32>, bool, PyCut);

/// Blocks of the table in one of the chain, and how many of those, the last ones, are kept.
#[derive(Clone, Copy)]
pub(crate) struct PyCut(pub(crate) Cut);

impl<'py> FromPyObject<'_, 'py> for PyCut {
    type Error = PyErr;
    fn extract(cut: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let (each, kept) = cut.extract()?;
        if kept == 0 || kept > each {
            return Err(ConfigError::new_err(format!("{kept} of {each} blocks cannot be kept")));
        }
        Ok(Self(Cut { each, kept }))
    }
}

/// Table, first block of the chain, behind the last one, first block of the table that is loaded, how the table is cut.
pub(crate) type Loaded<'py> = (Bound<'py, PyAny>, u32, u32, u32, PyCut);

/// Chunks by table, and how many could not be had.
pub(crate) type Reserved = (Vec<(usize, ChunkBatch)>, u32);

/// What a group keeps of single blocks: the key that all hang on, and theirs.
pub(crate) type Kept = (ChunkKey, Vec<ChunkKey>);

/// The prefix as each of `groups` keeps it.
pub(crate) fn kept_by<'a>(chain: &'a mut key::KeyChain, groups: &[Option<u32>]) -> Vec<Prefix<'a>> {
    for group in groups.iter().flatten() {
        chain.extend_group(*group);
    }
    let prefix = |(root, keys)| Prefix::new(root, keys);
    groups.iter().map(|group| prefix(chain.kept_by(*group))).collect()
}

/// Of one block, with the key of the prefix that ends with it: what a group keeps is kept beside that.
pub(crate) fn beside(chain: &key::KeyChain, group: u32, block: u32) -> PyResult<Kept> {
    let (root, mut keys) = chain.attached(group, [block]).map_err(raise)?;
    keys.extend(chain.keys().get(block as usize));
    Ok((root, keys))
}

/// What groups keep of single blocks, for (group, start, stop).
pub(crate) fn attached(chain: &key::KeyChain, rows: &[(u32, u32, u32)]) -> PyResult<Vec<Kept>> {
    rows.iter().map(|(group, start, stop)| chain.attached(*group, *start..*stop).map_err(raise)).collect()
}

/// Each of it as a prefix by itself.
pub(crate) fn each(kept: &[Kept]) -> impl Iterator<Item = Prefix<'_>> {
    kept.iter().flat_map(|(root, keys)| keys.chunks(1).map(|keys| Prefix::new(*root, keys)))
}

/// What is loaded of each row's table; None if one ends before.
pub(crate) fn loaded_blocks(rows: &[Loaded<'_>]) -> PyResult<Option<Vec<Vec<i32>>>> {
    let mut tables = Vec::with_capacity(rows.len());
    for (table, _, stop, begin, PyCut(cut)) in rows {
        let end = stop.saturating_mul(cut.each);
        if table.len()? < end as usize {
            return Ok(None);
        }
        tables.push(block_ids(table, *begin, Some(end))?);
    }
    Ok(Some(tables))
}

/// A row as the engine's session takes it.
pub(crate) fn load_row<'a>(((_, start, stop, _, cut), table): (&Loaded<'_>, &'a Vec<i32>)) -> LoadRow<'a> {
    LoadRow { blocks: *start..*stop, table, cut: cut.0 }
}

/// Blocks of one group's table. It is read before a chain is held: that may run Python code.
pub(crate) struct Blocks {
    start: u32,
    ids: Vec<i32>,
}

impl Blocks {
    /// What the table has for `[start, stop)` of the chain; of a group that keeps each block alone, as far as it goes.
    pub(crate) fn of(
        (nth, _, is_attached, PyCut(cut)): &SavedGroup,
        tables: &Bound<'_, PyAny>,
        start: u32,
        stop: u32,
    ) -> PyResult<Self> {
        let table = tables.get_item(*nth)?;
        let len = if *is_attached { u32::try_from(table.len()?).unwrap_or(u32::MAX) / cut.each } else { u32::MAX };
        let (start, stop) = (start.min(len), stop.min(len));
        let [first, end] = [start, stop].map(|at| at.saturating_mul(cut.each));
        Ok(Self { start, ids: block_ids(&table, first, Some(end))? })
    }
}

/// Blocks of one group that are to be saved.
pub(crate) struct Saved {
    group: Option<u32>,
    /// None: the group keeps the prefix.
    kept: Option<Kept>,
    range: SaveRange,
    blocks: Vec<i32>,
    each: u32,
}

impl Saved {
    /// All of them, or of those that are kept alone what the group has not given up.
    pub(crate) fn of(
        chain: &key::KeyChain,
        &(_, group, is_attached, PyCut(Cut { each, kept })): &SavedGroup,
        Blocks { start, ids }: Blocks,
    ) -> PyResult<Self> {
        let range = |start, num: usize| {
            let num = u32::try_from(num).unwrap_or(u32::MAX);
            SaveRange { start, stop: num.saturating_add(start), tail_blocks: 0 }
        };
        if !is_attached {
            let range = range(start, ids.len() / each as usize);
            return Ok(Self { group, kept: None, range, blocks: ids, each });
        }
        let (mut nths, mut blocks) = (Vec::with_capacity(ids.len()), Vec::with_capacity(ids.len()));
        for (nth, own) in (start..).zip(ids.chunks_exact(each as usize)) {
            let own = &own[(each - kept) as usize..];
            if !own.contains(&NULL_BLOCK) {
                nths.push(nth);
                blocks.extend_from_slice(own);
            }
        }
        let range = range(0, nths.len());
        let keys = chain.attached(group.unwrap_or_default(), nths).map_err(raise)?;
        Ok(Self { group, kept: Some(keys), range, blocks, each: kept })
    }

    /// What it asks of `chain`, on which `extend_group` was called.
    pub(crate) fn row<'a>(&'a self, chain: &'a key::KeyChain) -> SaveRow<'a> {
        let is_attached = self.kept.is_some();
        let (root, keys) = match &self.kept {
            Some((root, keys)) => (*root, keys.as_slice()),
            None => chain.kept_by(self.group),
        };
        let what = ToSave { prefix: Prefix::new(root, keys), range: self.range, is_attached };
        SaveRow { what, table: &self.blocks, first: self.range.start, each: self.each, replaced: None }
    }
}
