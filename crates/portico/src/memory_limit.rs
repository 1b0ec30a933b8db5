//! The memory that this process may use: the limit of its control group, else a part of the machine's.

use std::fmt;

use portico_net::memory_limit::{of_control_group, of_machine};

/// Without a limit: one part in so many of the machine's memory, which has other work to do.
const MACHINE_SHARE: u64 = 4;

/// Where a machine says nothing: what most have.
const UNKNOWN: u64 = 1 << 30;

/// A limit, and what set it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryLimit {
    pub(crate) bytes: usize,
    pub(crate) set_by: SetBy,
}

/// What a limit comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SetBy {
    /// `--memory-limit`.
    Flag,
    /// The control group of the process.
    ControlGroup,
    /// The machine, where the group has none.
    Machine,
}

impl MemoryLimit {
    /// The limit of this process; `flag` comes first.
    pub(crate) fn find(flag: Option<usize>) -> Self {
        if let Some(bytes) = flag {
            return Self { bytes, set_by: SetBy::Flag };
        }
        let total = of_machine().unwrap_or(UNKNOWN);
        let (bytes, set_by) = match of_control_group().filter(|&limit| limit < total) {
            Some(limit) => (limit, SetBy::ControlGroup),
            None => (total / MACHINE_SHARE, SetBy::Machine),
        };
        Self { bytes: usize::try_from(bytes).unwrap_or(usize::MAX), set_by }
    }
}

impl fmt::Display for SetBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Flag => "--memory-limit",
            Self::ControlGroup => "the control group",
            Self::Machine => "a fourth of the machine's memory",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_a_limit_and_the_flag_comes_first() {
        assert!(MemoryLimit::find(None).bytes > 1 << 20);
        assert_eq!(MemoryLimit::find(Some(7)), MemoryLimit { bytes: 7, set_by: SetBy::Flag });
    }
}
