//! Python bindings for `kvloft_core::io::Arena`, a worker's mapping of the frames.

use kvloft_core::io::{self, PartSpec};
use pyo3::prelude::*;

use crate::error::raise;
use crate::key::KeyBytes;

/// Frames in shared memory, mapped by a worker that may run in a separate process.
#[pyclass(frozen, module = "kvloft._core")]
pub(crate) struct Arena {
    /// None only while the arena is being dropped.
    inner: Option<io::Arena>,
    #[pyo3(get)]
    address: usize,
    #[pyo3(get)]
    size_bytes: usize,
    /// Number that identifies the shared memory.
    #[pyo3(get)]
    id: u64,
}

/// A frame part's position and trailer fields, read from a Python dict.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct FramePart {
    offset: u64,
    part_bytes: usize,
    key: KeyBytes,
    layout: KeyBytes,
    page_bytes: Vec<u32>,
    num_blocks: u32,
    rank: u32,
}

impl FramePart {
    fn spec(&self) -> PartSpec<'_> {
        let Self { key, layout, ref page_bytes, num_blocks, rank, .. } = *self;
        PartSpec { key: key.0, layout: layout.0.0, page_bytes, num_blocks, rank }
    }
}

impl Arena {
    fn of(inner: io::Arena) -> Self {
        let (address, size_bytes, id) = (inner.address(), inner.size_bytes(), inner.id());
        Self { inner: Some(inner), address, size_bytes, id }
    }

    fn inner(&self) -> &io::Arena {
        self.inner.as_ref().expect("set until drop")
    }
}

impl Drop for Arena {
    /// Unmaps the memory without the GIL, because unmapping 64 GiB can take 10 seconds.
    fn drop(&mut self) {
        let inner = self.inner.take();
        Python::try_attach(|py| py.detach(|| drop(inner)));
    }
}

/// Place unallocated pages on NUMA node `node`. Return False if the pages already have a NUMA
/// policy or the system call fails.
#[pyfunction]
pub(crate) fn prefer_numa_node(address: usize, num_bytes: usize, node: u32) -> bool {
    io::prefer_numa_node(address, num_bytes, node)
}

#[pymethods]
impl Arena {
    /// Map the arena at `path`.
    #[staticmethod]
    #[pyo3(signature = (path, *, size_bytes))]
    fn open(py: Python<'_>, path: &str, size_bytes: u64) -> PyResult<Self> {
        Ok(Self::of(py.detach(|| io::Arena::open(path, size_bytes)).map_err(raise)?))
    }

    /// Map memory that is not shared with other processes.
    #[staticmethod]
    fn private(size_bytes: u64) -> PyResult<Self> {
        Ok(Self::of(io::Arena::private(size_bytes).map_err(raise)?))
    }

    /// Compute the tag of a part's payload, write the trailer at the end of the part, and return
    /// the tag.
    fn seal(&self, py: Python<'_>, part: FramePart) -> PyResult<u64> {
        let seal = || self.inner().seal(part.offset, part.part_bytes, &part.spec());
        py.detach(seal).map_err(raise)
    }

    /// Return None if the part is intact. Otherwise, return the mismatch: 'unsealed', 'key',
    /// 'layout', 'shape' or 'tag'.
    fn check(&self, py: Python<'_>, part: FramePart) -> PyResult<Option<&'static str>> {
        let check = || self.inner().check(part.offset, part.part_bytes, &part.spec());
        Ok(py.detach(check).map_err(raise)?.map(io::Damage::as_str))
    }

    fn __repr__(&self) -> String {
        format!("Arena(size_bytes={})", self.size_bytes)
    }
}
