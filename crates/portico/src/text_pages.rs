//! Gives back the pages of program text that only the start needed.
//!
//! Flags, manifests and certificates are read by most of the program, once, and the kernel maps 64 KiB around every first
//! touch: some 7 MB of text count as memory of a process that goes on with a third of them. What is needed again is mapped
//! again, from the page cache, for the price of a minor fault.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ops::Range;

use rustix::mm::{Advice, madvise};

/// Unmaps the program's text for now. Where the system does not say where that is, everything stays as it was.
pub(crate) fn release() {
    let Some(text) = std::fs::read_to_string("/proc/self/maps").ok().and_then(|maps| text_of(&maps, here()))
    else {
        return;
    };
    // SAFETY: the range is the one mapping this very function runs from, which `text_of` has found to be the private
    // mapping of a file, executable and not writable. Its pages can only hold what the file holds, and MADV_DONTNEED on
    // such a mapping has the next access read them from there (madvise(2)).
    let _result = unsafe { madvise(text.start as *mut c_void, text.len(), Advice::LinuxDontNeed) };
}

/// An address in the program's text.
fn here() -> usize {
    release as *const () as usize
}

/// The mapping around `address`, if it is private, executable, not writable, and of a file. See proc_pid_maps(5).
fn text_of(maps: &str, address: usize) -> Option<Range<usize>> {
    maps.lines().find_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let hex = |text| usize::from_str_radix(text, 16).ok();
        let range = hex(start)?..hex(end)?;
        let is_text =
            fields.next() == Some("r-xp") && fields.nth(3).is_some_and(|path| path.starts_with('/'));
        (is_text && range.contains(&address)).then_some(range)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
55d0c8a00000-55d0c8a10000 r--p 00000000 fe:00 1001 /usr/bin/portico
55d0c8a10000-55d0c8a20000 r-xp 00010000 fe:00 1001 /usr/bin/portico
55d0c8a20000-55d0c8a30000 rw-p 00020000 fe:00 1001 /usr/bin/portico
7ffd7a5f0000-7ffd7a5f2000 r-xp 00000000 00:00 0    [vdso]
";

    #[test]
    fn only_the_text_of_a_file_is_given_back() {
        assert_eq!(text_of(MAPS, 0x55d0_c8a1_0010), Some(0x55d0_c8a1_0000..0x55d0_c8a2_0000));
        for elsewhere in [0x55d0_c8a0_0010, 0x55d0_c8a2_0010, 0x7ffd_7a5f_0010, 0x1000] {
            assert_eq!(text_of(MAPS, elsewhere), None);
        }
    }

    #[test]
    fn the_program_goes_on_with_fewer_pages() {
        // Kilobytes that are mapped of the program's text.
        let resident = || {
            let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let mut lines = smaps.lines().skip_while(|line| text_of(line, here()).is_none());
            let rss = lines.find_map(|line| line.strip_prefix("Rss:")).unwrap();
            rss.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
        };
        let before = resident();
        release();
        assert!(resident() < before);
    }
}
