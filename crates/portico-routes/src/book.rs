//! The book of objects that routes are made of.
