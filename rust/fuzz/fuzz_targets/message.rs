//! Any bytes are a message that comes out as it went in, or none; nothing panics.
#![no_main]

use kvloft_wire::protocol::{Answer, LENGTH_BYTES, Request};

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let mut bytes = Vec::new();
    if let Some((number, request)) = Request::decode(data) {
        request.encode(number, &mut bytes);
        assert_eq!(Request::decode(&bytes[LENGTH_BYTES..]), Some((number, request)));
    }
    bytes.clear();
    if let Some((number, answer)) = Answer::decode(data) {
        answer.encode(number, &mut bytes);
        assert_eq!(&bytes[LENGTH_BYTES..], data);
    }
});
