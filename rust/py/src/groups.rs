//! Reads KV cache groups and block tables from Python objects.

use std::ops::Range;

use kvloft_core::chunk_batch::NULL_BLOCK;
use kvloft_core::engine::{EngineSession, Group, GroupKind};
use kvloft_core::io::SizeClass;
use pyo3::prelude::*;

use crate::error::ConfigError;
use crate::tokens::{append_block_ids, block_ids};

/// A KV cache group, extracted from a tuple: (group number in keys or None, kind, tokens per block,
/// blocks per unit, kept blocks, reach in tokens, frame size class, frame size class for compressed
/// chunks or None).
pub(crate) struct PyGroup(pub(crate) Group);

impl<'py> FromPyObject<'_, 'py> for PyGroup {
    type Error = PyErr;
    fn extract(group: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let at = |nth: usize| group.get_item(nth);
        let [block_tokens, blocks_per_unit, kept_blocks, reach] =
            [2, 3, 4, 5].map(|nth| at(nth).and_then(|size| size.extract::<u32>()));
        let (number, kind): (Option<u32>, String) = (at(0)?.extract()?, at(1)?.extract()?);
        let kind = match kind.as_str() {
            "full" => GroupKind::Full,
            "window" => GroupKind::Window,
            "local" => GroupKind::Local,
            "state" => GroupKind::State,
            _ => {
                return Err(ConfigError::new_err(format!("unknown KV cache group kind: {kind:?}")));
            }
        };
        Ok(Self(Group {
            number,
            kind,
            block_tokens: block_tokens?,
            blocks_per_unit: blocks_per_unit?,
            kept_blocks: kept_blocks?,
            reach: reach?,
            class: SizeClass(at(6)?.extract()?),
            compact: at(7)?.extract::<Option<u8>>()?.map(SizeClass),
        }))
    }
}

/// Appends the blocks of `units` for each saved group. Missing blocks become null blocks, because a
/// group that needs only part of a prefix can have fewer blocks.
pub(crate) fn append_saved_blocks(
    session: &EngineSession,
    tables: &Bound<'_, PyAny>,
    units: &Range<u32>,
    blocks: &mut Vec<i32>,
) -> PyResult<()> {
    for (nth, group) in session.saved_groups() {
        let table = tables.get_item(nth)?;
        let [first, end] =
            [units.start, units.end].map(|unit| unit.saturating_mul(group.blocks_per_unit));
        let len =
            if group.is_full() { end } else { u32::try_from(table.len()?).unwrap_or(u32::MAX) };
        append_block_ids(&table, first.min(len), Some(end.min(len)), blocks)?;
        let num_missing = end.saturating_sub(first.max(len));
        blocks.extend((0..num_missing).map(|_| NULL_BLOCK));
    }
    Ok(())
}

/// Returns the blocks in each table's range. Returns None if a table is too short.
pub(crate) fn loaded_blocks(
    tables: &Bound<'_, PyAny>,
    ranges: &[Range<u32>],
) -> PyResult<Option<Vec<Vec<i32>>>> {
    let mut found = Vec::with_capacity(ranges.len());
    for (nth, Range { start, end }) in ranges.iter().enumerate() {
        let table = tables.get_item(nth)?;
        if table.len()? < *end as usize {
            return Ok(None);
        }
        found.push(block_ids(&table, (*start).min(*end), Some(*end))?);
    }
    Ok(Some(found))
}
