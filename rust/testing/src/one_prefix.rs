//! Store and session calls that take a single prefix. Engines pass many prefixes in each call.

use std::ops::Range;

use kvloft_core::Result;
use kvloft_core::session::{LeaseId, Session};
use kvloft_core::store::{Lookup, Prefix, ReadLease, Reservation, Reserved, Store, WriteLease};

/// Store calls that take a single prefix.
pub trait StoreExt {
    /// See [`Store::lookup_many`].
    fn lookup<'a>(&self, prefix: impl Into<Prefix<'a>>) -> Lookup;

    /// See [`Store::acquire_all`].
    fn acquire<'a>(&self, prefix: impl Into<Prefix<'a>>) -> ReadLease;

    /// See [`Store::reserve_many`].
    fn reserve<'a>(
        &self,
        prefix: impl Into<Prefix<'a>>,
        units: Range<u32>,
    ) -> Result<Reserved<WriteLease>>;
}

impl StoreExt for Store {
    fn lookup<'a>(&self, prefix: impl Into<Prefix<'a>>) -> Lookup {
        self.lookup_many(&[prefix.into()]).pop().unwrap_or_default()
    }

    fn acquire<'a>(&self, prefix: impl Into<Prefix<'a>>) -> ReadLease {
        self.acquire_all(&[prefix.into()])
    }

    fn reserve<'a>(
        &self,
        prefix: impl Into<Prefix<'a>>,
        units: Range<u32>,
    ) -> Result<Reserved<WriteLease>> {
        Ok(self.reserve_many(None, &[(prefix.into(), units).into()])?.remove(0))
    }
}

/// Session calls that take a single prefix.
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
        let reserved = self.reserve_many(&[(prefix, units).into()])?.remove(0);
        Ok((reserved.chunks, reserved.num_dropped))
    }
}

impl<S: Session + ?Sized> SessionExt for S {}
