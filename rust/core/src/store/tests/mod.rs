//! Tests that access the store's private state, and a check that other tests call after each step.

#[cfg(test)]
mod bad_sectors;
#[cfg(test)]
mod breaker;
mod check;
#[cfg(test)]
mod inside;
#[cfg(test)]
mod jobs;
#[cfg(test)]
mod lookup;
#[cfg(test)]
mod steps;
#[cfg(test)]
mod time_shares;
