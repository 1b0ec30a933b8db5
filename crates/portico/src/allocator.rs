//! What the C library's allocator keeps, and what it gives back.
//!
//! Bulk transfers take and free buffers of 120 KiB all the time. By default every free of them at the end of
//! the heap returns the pages to the system, and the next allocation takes a page fault for each: a quarter
//! of what a gigabyte through a tunnel costs. So some are kept; and once, when the start is done, everything
//! is returned, for the start needs more than what follows.
#![allow(unsafe_code)]

use std::ffi::c_int;

/// Free bytes at the end of a heap that are kept: the windows of a few transfers at a time.
const KEPT: c_int = 2 * 1024 * 1024;

/// Keeps buffers from being given back and fetched again. To be called first, while there is one thread.
pub(crate) fn keep_buffers() {
    // SAFETY: mallopt(3) takes two integers and has no other input; no other thread runs yet. Should it
    // refuse, the default stays.
    let _accepted = unsafe { libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT) };
}

/// Returns what is free now, wherever it is.
pub(crate) fn give_back() {
    // SAFETY: malloc_trim(3) may be called at any time from any thread; it only returns free pages.
    let _returned = unsafe { libc::malloc_trim(0) };
}
