//! Python bindings for `kvloft_core::engine::Lease`.

use std::sync::Arc;

use kvloft_core::chunk_batch::UnitsByTier;
use kvloft_core::engine::{EngineSession, Lease};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

use crate::batch::ChunkBatch;
use crate::error::raise;
use crate::groups::loaded_blocks;

/// Returns the number of units in each tier, omitting tiers with no units.
fn by_tier(py: Python<'_>, from: UnitsByTier) -> PyResult<Bound<'_, PyDict>> {
    [("host", from.host), ("disk", from.disk)]
        .into_iter()
        .filter(|(_, num_units)| *num_units > 0)
        .into_py_dict(py)
}

/// Pins chunks in host memory while more chunks are read from disk. Dropping the lease unpins all
/// chunks.
#[pyclass(frozen, module = "kvloft._core")]
pub(crate) struct ReadLease {
    pub(crate) session: Arc<EngineSession>,
    pub(crate) lease: Lease,
}

#[pymethods]
impl ReadLease {
    /// Return (number of units ready to load, number of units still being read from disk).
    fn poll(&self) -> (u32, u32) {
        self.session.poll(&self.lease)
    }

    /// Return the ready chunks of units `[begin, end)` with their blocks from `tables`, and the
    /// number of units in each tier.
    fn batch<'py>(
        &self,
        tables: &Bound<'py, PyAny>,
        begin: u32,
        end: u32,
    ) -> PyResult<(ChunkBatch, Bound<'py, PyDict>)> {
        let blocks = loaded_blocks(tables, &self.session.loaded_blocks(begin, end))?;
        let found =
            blocks.map(|blocks| self.session.load(&self.lease, begin, end, &blocks)).transpose();
        let (chunks, from) = found.map_err(raise)?.unwrap_or_default();
        Ok((chunks.into(), by_tier(tables.py(), from)?))
    }

    /// Unpin all chunks immediately.
    fn release(&self) {
        self.session.release(&self.lease);
    }

    fn __repr__(&self) -> String {
        let (ready_units, pending_units) = self.poll();
        format!("ReadLease(ready_units={ready_units}, pending_units={pending_units})")
    }
}

impl Drop for ReadLease {
    fn drop(&mut self) {
        self.release();
    }
}
