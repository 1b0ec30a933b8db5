//! The codes of RST_STREAM by which a client learns how its tunnel ended (RFC 9113, section 7).

use h2::Reason;

/// The connection behind the tunnel was reset or broke.
pub const BROKEN: Reason = Reason::CONNECT_ERROR;
/// The tunnel was idle for too long, or cut.
pub const CUT: Reason = Reason::CANCEL;
/// It held bytes that its receiver did not take, and others needed the memory.
pub const MEMORY: Reason = Reason::ENHANCE_YOUR_CALM;
