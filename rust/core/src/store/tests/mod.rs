//! Tests that look inside the store, and the check that others ask for after every step.

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
