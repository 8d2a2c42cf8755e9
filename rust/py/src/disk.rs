//! Python bindings `disk_inspect` and `DiskVerify`, which read a disk directory without an engine.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard};

use kvloft_core::sync::locked;
use kvloft_core::tier::disk::{Damage, NamespaceInfo, Verifier, inspect};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::raise;

#[pyfunction]
pub(crate) fn disk_inspect(py: Python<'_>, path: PathBuf) -> PyResult<Vec<Bound<'_, PyDict>>> {
    let infos = py.detach(|| inspect(&path)).map_err(raise)?;
    infos.iter().map(|info| namespace_dict(py, info)).collect()
}

fn namespace_dict<'py>(py: Python<'py>, info: &NamespaceInfo) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("namespace", &info.name)?;
    dict.set_item("description", &info.description)?;
    dict.set_item("chunks", info.chunks)?;
    dict.set_item("slots", info.slots)?;
    dict.set_item("frame_sizes", &info.frame_sizes)?;
    dict.set_item("bytes", info.bytes)?;
    dict.set_item("oldest", info.oldest_s)?;
    dict.set_item("newest", info.newest_s)?;
    dict.set_item("problem", &info.problem)?;
    Ok(dict)
}

/// Verifies the key and checksum of every chunk in a disk directory, one step at a time, so that
/// the caller can report progress.
#[pyclass(frozen, module = "kvloft._core", name = "DiskVerify")]
pub(crate) struct DiskVerify {
    verifier: Mutex<Verifier>,
}

impl DiskVerify {
    fn verifier(&self) -> MutexGuard<'_, Verifier> {
        locked(&self.verifier)
    }
}

#[pymethods]
impl DiskVerify {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let verifier = py.detach(|| Verifier::open(&path)).map_err(raise)?;
        Ok(Self { verifier: Mutex::new(verifier) })
    }

    #[getter]
    fn num_chunks(&self) -> u64 {
        self.verifier().num_chunks()
    }

    #[getter]
    fn num_checked(&self) -> u64 {
        self.verifier().num_checked()
    }

    fn step<'py>(&self, py: Python<'py>, max_chunks: u64) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let damage = py.detach(|| self.verifier().step(max_chunks));
        damage.iter().map(|found| damage_dict(py, found)).collect()
    }

    fn __repr__(&self) -> String {
        let verifier = self.verifier();
        format!(
            "DiskVerify({} of {} chunks checked)",
            verifier.num_checked(),
            verifier.num_chunks()
        )
    }
}

fn damage_dict<'py>(py: Python<'py>, found: &Damage) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("namespace", &found.namespace)?;
    dict.set_item("slot", found.slot)?;
    dict.set_item("frame_bytes", found.frame_bytes)?;
    dict.set_item("key", found.key.as_deref())?;
    dict.set_item("problem", &found.problem)?;
    dict.set_item("is_other_format", found.is_other_format)?;
    Ok(dict)
}
