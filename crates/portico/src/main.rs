//! The front door of hosted Kubernetes control planes.
fn main() {}
