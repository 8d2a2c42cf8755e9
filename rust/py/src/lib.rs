//! `kvloft._core`: conversions between Python and `kvloft_core`, nothing else.

use pyo3::prelude::*;

#[pymodule(gil_used = false)]
fn _core(_m: &Bound<'_, PyModule>) -> PyResult<()> {
    Ok(())
}
