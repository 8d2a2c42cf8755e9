//! `Arena`: a worker's view of the frames. Conversions only; the meaning is in `kvloft_core::io`.

use kvloft_core::io::{self, FrameId, PartSpec, TRAILER_BYTES};
use kvloft_core::key::ChunkKey;
use pyo3::prelude::*;

use crate::error::raise;
use crate::key::digest;

/// Frames in shared memory, as a worker (maybe in another process) maps them.
#[pyclass(frozen, module = "kvloft._core")]
pub(crate) struct Arena {
    inner: io::Arena,
}

#[pymethods]
impl Arena {
    /// Map the arena at `path`.
    #[staticmethod]
    #[pyo3(signature = (path, *, frame_bytes, num_frames))]
    fn open(py: Python<'_>, path: &str, frame_bytes: u64, num_frames: u32) -> PyResult<Self> {
        let inner = py.detach(|| io::Arena::open(path, frame_bytes, num_frames)).map_err(raise)?;
        Ok(Self { inner })
    }

    #[getter]
    fn address(&self) -> usize {
        self.inner.address()
    }

    #[getter]
    fn size_bytes(&self) -> usize {
        self.inner.size_bytes()
    }

    #[getter]
    fn frame_bytes(&self) -> usize {
        self.inner.frame_bytes()
    }

    #[getter]
    fn num_frames(&self) -> u32 {
        self.inner.num_frames()
    }

    /// Tag the payload at `offset` of `frame` and write the trailer at the end of the part; returns the tag.
    #[pyo3(signature = (frame, *, offset, part_bytes, key, layout, page_bytes, num_blocks, rank))]
    #[expect(
        clippy::too_many_arguments,
        clippy::needless_pass_by_value,
        reason = "keyword arguments in Python, handed over"
    )]
    fn seal(
        &self,
        py: Python<'_>,
        frame: u32,
        offset: usize,
        part_bytes: usize,
        key: &[u8],
        layout: &[u8],
        page_bytes: Vec<u32>,
        num_blocks: u32,
        rank: u32,
    ) -> PyResult<u64> {
        let key = ChunkKey(digest(key, "key")?);
        let spec = PartSpec { key, layout: digest(layout, "layout")?, page_bytes: &page_bytes, num_blocks, rank };
        py.detach(|| self.inner.seal(FrameId(frame), offset, part_bytes, &spec)).map_err(raise)
    }

    /// None if trailer and tag match; else one of 'unsealed', 'key', 'layout', 'shape', 'tag'.
    #[pyo3(signature = (frame, *, offset, part_bytes, key, layout, page_bytes, num_blocks, rank))]
    #[expect(
        clippy::too_many_arguments,
        clippy::needless_pass_by_value,
        reason = "keyword arguments in Python, handed over"
    )]
    fn check(
        &self,
        py: Python<'_>,
        frame: u32,
        offset: usize,
        part_bytes: usize,
        key: &[u8],
        layout: &[u8],
        page_bytes: Vec<u32>,
        num_blocks: u32,
        rank: u32,
    ) -> PyResult<Option<&'static str>> {
        let key = ChunkKey(digest(key, "key")?);
        let spec = PartSpec { key, layout: digest(layout, "layout")?, page_bytes: &page_bytes, num_blocks, rank };
        let damage = py.detach(|| self.inner.check(FrameId(frame), offset, part_bytes, &spec)).map_err(raise)?;
        Ok(damage.map(io::Damage::as_str))
    }

    fn __repr__(&self) -> String {
        format!("Arena(num_frames={}, frame_bytes={})", self.inner.num_frames(), self.inner.frame_bytes())
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("TRAILER_BYTES", TRAILER_BYTES)?;
    module.add_class::<Arena>()
}
