//! Load, peers and measurements.
fn main() {}
