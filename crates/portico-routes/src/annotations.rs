//! The expose annotations of a Service.
