//! Tests that access private state of the store, and the check that other tests call after every
//! step.

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
