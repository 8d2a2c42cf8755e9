//! Calls for a single prefix. Engines pass many prefixes per call.

use std::ops::Range;

use kvloft_core::Result;
use kvloft_core::session::{LeaseId, Session};
use kvloft_core::store::{Lookup, Prefix, ReadLease, Reservation, Store, WriteLease};

/// Result of [`StoreExt::reserve`]: a lease for each chunk to fill, and the number of chunks that
/// got no frame.
#[derive(Debug, Default)]
pub struct Reserved {
    /// Leases in prefix order.
    pub leases: Vec<WriteLease>,
    /// Number of chunks, counted from the first chunk without a frame or parent.
    pub num_dropped: u32,
}

/// Calls to a store for a single prefix.
pub trait StoreExt {
    /// See [`Store::lookup_many`].
    fn lookup<'a>(&self, prefix: impl Into<Prefix<'a>>) -> Lookup;

    /// See [`Store::acquire_all`].
    fn acquire<'a>(&self, prefix: impl Into<Prefix<'a>>) -> ReadLease;

    /// See [`Store::reserve_many`].
    fn reserve<'a>(&self, prefix: impl Into<Prefix<'a>>, units: Range<u32>) -> Result<Reserved>;
}

impl StoreExt for Store {
    fn lookup<'a>(&self, prefix: impl Into<Prefix<'a>>) -> Lookup {
        self.lookup_many(&[prefix.into()]).pop().unwrap_or_default()
    }

    fn acquire<'a>(&self, prefix: impl Into<Prefix<'a>>) -> ReadLease {
        self.acquire_all(&[prefix.into()])
    }

    fn reserve<'a>(&self, prefix: impl Into<Prefix<'a>>, units: Range<u32>) -> Result<Reserved> {
        let (leases, got) = self.reserve_many(None, &[(prefix.into(), units).into()])?;
        Ok(Reserved { leases, num_dropped: got[0].num_dropped })
    }
}

/// Calls to a session for a single prefix.
pub trait SessionExt: Session {
    /// See [`Session::lookup_many`].
    fn lookup(&self, prefix: Prefix<'_>) -> Lookup {
        self.lookup_many(&[prefix]).pop().unwrap_or_default()
    }

    /// See [`Session::acquire_all`].
    fn acquire(&self, prefix: Prefix<'_>) -> LeaseId {
        self.acquire_all(&[prefix])
    }

    /// See [`Session::reserve_many`]. Returns the reservations and the number of chunks that got no
    /// frame.
    fn reserve(&self, prefix: Prefix<'_>, units: Range<u32>) -> Result<(Vec<Reservation>, u32)> {
        let (reserved, got) = self.reserve_many(&[(prefix, units).into()])?;
        Ok((reserved, got.first().map_or(0, |got| got.num_dropped)))
    }
}

impl<S: Session + ?Sized> SessionExt for S {}
