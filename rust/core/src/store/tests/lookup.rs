//! Tests the search for the end of the stored units.

use super::super::lookup::leading;

#[test]
fn leading_finds_every_end_with_few_probes() {
    for num in 0..200 {
        for end in 0..=num {
            let mut probes = 0;
            let found = leading(num, |at| {
                assert!(at < num);
                probes += 1;
                at < end
            });
            assert_eq!(found, end, "{num}");
            assert!(probes <= 17, "{probes} probes for {end} of {num}");
        }
    }
}
