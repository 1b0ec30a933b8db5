//! Netlink as far as the agent needs it: messages, and sockets that ask the kernel or are told by it.
//!
//! A codec of our own instead of a library: the two protocols spoken here (rtnetlink(7) for interfaces, addresses and routes;
//! nfnetlink for one nftables rule) share it, and it is smaller than the code that would use one.

mod message;
mod socket;

pub(super) use message::{Message, attributes};
pub(super) use socket::{NETFILTER, ROUTE, Request, Watch};
