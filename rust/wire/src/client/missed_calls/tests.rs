//! Tests that the first missed call is logged immediately, and that later missed calls are logged
//! at most once a minute.

use super::*;

fn logged(missed: &mut MissedCalls, now: Instant) -> Option<String> {
    let line = missed.log_line(now, "the server", Duration::from_millis(5))?;
    line.split(" to the server timed out (server_timeout = 5ms)").next().map(str::to_owned)
}

#[test]
fn first_missed_call_is_logged_at_once_and_later_ones_once_a_minute() {
    let (mut missed, begin) = (MissedCalls::default(), Instant::now());
    let after = |seconds| begin + Duration::from_secs(seconds);
    assert_eq!(logged(&mut missed, begin), None);
    missed.num += 1;
    assert_eq!(logged(&mut missed, after(1)).as_deref(), Some("1 call"));
    assert_eq!(logged(&mut missed, after(2)), None);
    (0..3).for_each(|_| missed.num += 1);
    assert_eq!(logged(&mut missed, after(60)), None);
    assert_eq!(logged(&mut missed, after(61)).as_deref(), Some("3 more calls"));
    assert_eq!((logged(&mut missed, after(600)), missed.num), (None, 4));
    missed.num += 1;
    missed.num_chunks += 5;
    let line = missed.log_line(after(601), "the server", Duration::from_millis(5)).expect("due");
    assert!(
        line.starts_with("1 more call")
            && line.ends_with("was treated as a miss; retrying the saves of 5 chunks"),
        "{line}"
    );
    assert_eq!((missed.take_new(), missed.take_new()), ([5, 5], [0, 0]));
}
