//! `kvloft._core`: conversions between Python and `kvloft_core`, nothing else.

mod error;
mod key;
mod tokens;

use pyo3::prelude::*;

#[pymodule(gil_used = false)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    error::register(module)?;
    key::register(module)
}
