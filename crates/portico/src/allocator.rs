//! The memory that the C library's allocator keeps, and the memory that it gives back.
//!
//! Bulk transfers take and free buffers of 120 KiB all the time. By default every free of them at the end of
//! the heap returns the pages to the system. The next allocation takes a page fault for each page. That is a
//! quarter of the cost of a gigabyte through a tunnel. So some are kept. When the start is done, all are
//! returned: the start needs more than what follows. The memory that a burst leaves is returned some seconds
//! after it. Such a burst is a thousand connections, say, or a hundred receivers that did not read.
#![allow(unsafe_code)]

use std::convert::Infallible;
use std::ffi::c_int;
use std::time::Duration;

use tokio::time::sleep;

/// Free bytes at the end of a heap that are kept: the windows of a few transfers at a time.
const KEPT: c_int = 2 * 1024 * 1024;

/// The size up to which a freed block that is in no thread's cache waits to be merged with its neighbours:
/// none waits. By default small ones do, until the next large allocation merges them all, and each connection
/// makes large ones.
const UNMERGED: c_int = 0;

/// Between two looks at what is free.
const LOOK: Duration = Duration::from_secs(10);

/// Memory that became free, and is free at two looks in a row, is not needed soon.
const SURPLUS: usize = 8 * 1024 * 1024;

/// Keeps buffers from being given back and fetched again, and small blocks from waiting to be merged. To be
/// called first, while there is one thread.
pub(crate) fn set_up() {
    for (parameter, value) in [(libc::M_TRIM_THRESHOLD, KEPT), (libc::M_MXFAST, UNMERGED)] {
        // SAFETY: mallopt(3) takes two integers and has no other input; no other thread runs yet. Should it
        // refuse, the default stays.
        let _accepted = unsafe { libc::mallopt(parameter, value) };
    }
}

/// Returns what is free now, wherever it is.
pub(crate) fn give_back() {
    // SAFETY: malloc_trim(3) may be called at any time from any thread; it only returns free pages.
    let _returned = unsafe { libc::malloc_trim(0) };
}

/// Returns, for as long as the process runs, what becomes free and stays free.
pub(crate) async fn give_back_after_bursts() -> Infallible {
    // The system already has the pages that were free at the last look.
    let mut returned = free();
    let mut had_surplus = false;
    loop {
        sleep(LOOK).await;
        let free = free();
        returned = returned.min(free);
        let has_surplus = free - returned >= SURPLUS;
        if has_surplus && had_surplus {
            give_back();
            returned = free;
        }
        had_surplus = has_surplus && !had_surplus;
    }
}

/// Bytes that the allocator has and nobody uses.
fn free() -> usize {
    // SAFETY: mallinfo2(3) may be called at any time from any thread; it only reads counters.
    unsafe { libc::mallinfo2() }.fordblks
}
