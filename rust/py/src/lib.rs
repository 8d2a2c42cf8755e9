//! `kvloft._core`: conversions between Python and `kvloft_core`, nothing else.

mod arena;
mod batch;
mod disk;
mod error;
mod key;
mod session;
mod tokens;

use pyo3::prelude::*;

#[pymodule(gil_used = false)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    error::register(module)?;
    key::register(module)?;
    arena::register(module)?;
    disk::register(module)?;
    batch::register(module)?;
    session::register(module)
}
