//! Decodes arbitrary bytes. Decoding must not panic, and decoded messages must round-trip.
#![no_main]

use kvloft_wire::protocol::admin::AdminRequest;
use kvloft_wire::protocol::{LENGTH_BYTES, Request, Response};

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let mut bytes = Vec::new();
    if let Some((number, request)) = Request::decode(data) {
        request.encode(number, &mut bytes);
        assert_eq!(Request::decode(&bytes[LENGTH_BYTES..]), Some((number, request)));
    }
    let _none = AdminRequest::parse(data);
    bytes.clear();
    if let Some((number, response)) = Response::decode(data) {
        response.encode(number, &mut bytes);
        assert_eq!(&bytes[LENGTH_BYTES..], data);
    }
});
