//! `ReadLease`: conversions only; the meaning is in `kvloft_core::session`.

use std::sync::Arc;

use kvloft_core::batch::BlocksByTier;
use kvloft_core::engine::EngineSession;
use kvloft_core::session::LeaseId;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

use crate::batch::ChunkBatch;
use crate::error::raise;
use crate::groups::{Loaded, load_row, loaded_blocks};
use crate::tokens::block_ids;

/// Numbers of blocks, of tiers that have any.
fn by_tier(py: Python<'_>, from: BlocksByTier) -> PyResult<Bound<'_, PyDict>> {
    [("host", from.host), ("disk", from.disk)].into_iter().filter(|(_, num_blocks)| *num_blocks > 0).into_py_dict(py)
}

/// Pins on the host part of prefixes; disk chunks behind it are being read in. Dropping it unpins.
#[pyclass(frozen, module = "kvloft._core")]
pub(crate) struct ReadLease {
    pub(crate) session: Arc<EngineSession>,
    pub(crate) id: LeaseId,
}

#[pymethods]
impl ReadLease {
    /// (blocks ready and pinned from position 0, blocks still being read).
    fn poll(&self) -> (u32, u32) {
        let progress = self.session.session().poll(self.id);
        (progress.ready_blocks, progress.pending_blocks)
    }

    /// Chunks for the blocks `table[begin:end]` as far as they are ready, and how many blocks come from which tier.
    fn batch<'py>(
        &self,
        table: &Bound<'py, PyAny>,
        begin: u32,
        end: u32,
    ) -> PyResult<(ChunkBatch, Bound<'py, PyDict>)> {
        let blocks = block_ids(table, begin, Some(end))?;
        let (chunks, from) = self.session.load(self.id, &blocks, begin).map_err(raise)?;
        Ok((chunks.into(), by_tier(table.py(), from)?))
    }

    /// Of a lease on groups: its chunks in their order are blocks `[start, stop)` of the chain for each (table, start, stop, begin, cut),
    /// and what the table has from its block `begin` on is loaded. The first row's chunks by tier. None if a chunk is not ready, or has
    /// no block to go to.
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over")]
    fn batches<'py>(
        &self,
        py: Python<'py>,
        rows: Vec<Loaded<'py>>,
    ) -> PyResult<Option<(Vec<ChunkBatch>, Bound<'py, PyDict>)>> {
        let Some(tables) = loaded_blocks(&rows)? else { return Ok(None) };
        let asked: Vec<_> = rows.iter().zip(&tables).map(load_row).collect();
        let Some(found) = self.session.load_rows(self.id, &asked).map_err(raise)? else { return Ok(None) };
        let from = found.first().map(|(_, from)| *from).unwrap_or_default();
        Ok(Some((found.into_iter().map(|(chunks, _)| chunks.into()).collect(), by_tier(py, from)?)))
    }

    /// Unpin now.
    fn release(&self) {
        self.session.session().release(self.id);
    }

    fn __repr__(&self) -> String {
        let (ready_blocks, pending_blocks) = self.poll();
        format!("ReadLease(ready_blocks={ready_blocks}, pending_blocks={pending_blocks})")
    }
}

impl Drop for ReadLease {
    fn drop(&mut self) {
        self.release();
    }
}
