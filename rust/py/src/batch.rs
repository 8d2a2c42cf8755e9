//! Python bindings for `kvloft_core::chunk_batch`.

use std::sync::Arc;

use kvloft_core::chunk_batch::{self, Columns};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyIterator, PyList, PySlice, PyTuple, PyType};

use crate::error::raise;

/// One group's columns: (group, frames, keys, blocks).
type PyColumns<'py> = (u32, Bound<'py, PyBytes>, Bound<'py, PyBytes>, Bound<'py, PyBytes>);

fn columns_of<'a>((group, frames, keys, blocks): &'a PyColumns<'_>) -> Columns<&'a [u8]> {
    Columns {
        group: *group,
        frames: frames.as_bytes(),
        keys: keys.as_bytes(),
        blocks: blocks.as_bytes(),
    }
}

/// A batch of chunks to copy, stored in columns. See `kvloft.seam.batch`.
#[pyclass(frozen, eq, sequence, module = "kvloft._core")]
#[derive(PartialEq)]
pub(crate) struct ChunkBatch {
    pub(crate) inner: Arc<chunk_batch::ChunkBatch>,
}

impl From<chunk_batch::ChunkBatch> for ChunkBatch {
    fn from(inner: chunk_batch::ChunkBatch) -> Self {
        Self { inner: Arc::new(inner) }
    }
}

impl ChunkBatch {
    fn row<'py>(&self, py: Python<'py>, nth: usize) -> PyResult<Bound<'py, PyAny>> {
        static ROW: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let chunk = self.inner.chunk(nth);
        let blocks = PyTuple::new(py, chunk.blocks)?;
        let key = PyBytes::new(py, &chunk.key.0);
        let ticket = chunk.ticket.map_or(-1, u64::cast_signed);
        let fields =
            (chunk.frame.number(), key, chunk.num_blocks, chunk.first_block, blocks, ticket);
        ROW.import(py, "kvloft.seam.batch", "ChunkCopy")?.call1(fields)
    }
}

#[pymethods]
impl ChunkBatch {
    /// Create a batch from each group's columns and the tickets. Raise `ConfigError` if the columns
    /// are inconsistent.
    #[new]
    fn new(parts: Vec<PyColumns<'_>>, tickets: &[u8]) -> PyResult<Self> {
        let parts: Vec<_> = parts.iter().map(columns_of).collect();
        chunk_batch::ChunkBatch::from_columns(&parts, tickets).map(Self::from).map_err(raise)
    }

    /// Return a single batch with all chunks from `batches`, assigned to the first batch's group.
    #[staticmethod]
    fn concat(batches: Vec<PyRef<'_, Self>>) -> Self {
        chunk_batch::ChunkBatch::concat(batches.iter().map(|batch| &*batch.inner)).into()
    }

    /// Return a (group, batch) pair for each KV cache group.
    fn by_group(&self) -> Vec<(u32, Self)> {
        self.inner.by_group().into_iter().map(|(group, batch)| (group, batch.into())).collect()
    }

    /// Return a (group, size class, batch) tuple for each KV cache group and frame size class.
    fn by_size(&self) -> Vec<(u32, u8, Self)> {
        let sizes = self.inner.by_size().into_iter();
        sizes.map(|(group, class, batch)| (group, class.0, batch.into())).collect()
    }

    /// Return ([(group, frames, keys, blocks)], tickets), with one tuple per group. Columns are
    /// little-endian bytes: u32 frames, 32-byte keys, i32 blocks and u64 tickets.
    fn columns<'py>(&self, py: Python<'py>) -> (Vec<PyColumns<'py>>, Bound<'py, PyBytes>) {
        let bytes = |column: Vec<u8>| PyBytes::new(py, &column);
        let part = |part: Columns<Vec<u8>>| {
            (part.group, bytes(part.frames), bytes(part.keys), bytes(part.blocks))
        };
        let tickets: Vec<_> =
            self.inner.tickets().iter().flat_map(|ticket| ticket.to_le_bytes()).collect();
        (self.inner.columns().map(part).collect(), PyBytes::new(py, &tickets))
    }

    fn __reduce__<'py>(
        slf: &Bound<'py, Self>,
    ) -> PyResult<(Bound<'py, PyType>, Bound<'py, PyTuple>)> {
        Ok((slf.get_type(), slf.get().columns(slf.py()).into_pyobject(slf.py())?))
    }

    /// Return the reservation tickets. Loads have no tickets.
    pub(crate) fn tickets(&self) -> &[u64] {
        self.inner.tickets()
    }

    /// Return the ids of all paged blocks that the batch copies.
    fn block_ids(&self) -> Vec<i32> {
        self.inner.wanted_blocks().collect()
    }

    /// Return a batch with each group's chunks sorted by frame.
    fn by_frame(&self) -> Self {
        self.inner.by_frame().into()
    }

    /// Raise `ConfigError` if copying a chunk would access memory outside the arena, its frame or
    /// the paged KV cache.
    #[pyo3(signature = (*, num_frames, num_blocks, blocks_per_chunk))]
    fn check(&self, num_frames: u32, num_blocks: u32, blocks_per_chunk: u32) -> PyResult<()> {
        self.inner.check(num_frames, num_blocks, blocks_per_chunk).map_err(raise)
    }

    fn __len__(&self) -> usize {
        self.inner.len()
    }

    fn __getitem__<'py>(
        &self,
        py: Python<'py>,
        index: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let len = self.inner.len().cast_signed();
        if let Ok(slice) = index.cast::<PySlice>() {
            let at = slice.indices(len)?;
            let positions = (0..at.slicelength)
                .map(|nth| (at.start + nth.cast_signed() * at.step).cast_unsigned());
            return Ok(Bound::new(py, Self::from(self.inner.take(positions)))?.into_any());
        }
        let index: isize = index.extract()?;
        let index = if index < 0 { index + len } else { index };
        if !(0..len).contains(&index) {
            return Err(PyIndexError::new_err("chunk index out of range"));
        }
        self.row(py, index.cast_unsigned())
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        let rows: Vec<_> =
            (0..self.inner.len()).map(|nth| self.row(py, nth)).collect::<PyResult<_>>()?;
        PyList::new(py, rows)?.try_iter()
    }

    fn __repr__(&self) -> String {
        format!(
            "ChunkBatch({} chunks, {} blocks)",
            self.inner.len(),
            self.inner.wanted_blocks().count()
        )
    }
}
